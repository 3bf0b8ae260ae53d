import { make } from "./dom.ts";

/** A text that may grow: paragraphs, and the code in it as code. All of it is text, and none of it HTML. */
export class TextView {
  readonly element = make("div", "text");
  /** What each child was made of. */
  readonly #sources: string[] = [];

  show(text: string): void {
    const blocks = blocksOf(text);
    for (const [at, block] of blocks.entries()) {
      const source = JSON.stringify(block);
      if (this.#sources[at] === source) continue;
      this.#sources[at] = source;
      const element = elementOf(block);
      const old = this.element.children[at];
      if (old) old.replaceWith(element);
      else this.element.append(element);
    }
    this.#sources.length = blocks.length;
    while (this.element.children.length > blocks.length) this.element.lastElementChild!.remove();
  }
}

interface Block {
  readonly kind: "paragraph" | "code";
  readonly text: string;
}

/** Code stands between lines of three backticks, the second of which may not have come yet. */
function blocksOf(text: string): Block[] {
  const blocks: Block[] = [];
  for (const [at, part] of text.split(/^ {0,3}```.*(?:\n|$)/m).entries()) {
    if (at % 2 === 1) blocks.push({ kind: "code", text: part.replace(/\n$/, "") });
    else for (const paragraph of paragraphsOf(part)) blocks.push({ kind: "paragraph", text: paragraph });
  }
  return blocks;
}

const paragraphsOf = (text: string): string[] =>
  text.split(/\n{2,}/).flatMap((part) => (part.trim() === "" ? [] : [part.replace(/^\n|\s+$/g, "")]));

function elementOf({ kind, text }: Block): HTMLElement {
  if (kind === "paragraph") return make("p", "", ...inlineOf(text));
  const pre = make("pre", "", make("code", "", text));
  pre.tabIndex = 0; // it may scroll sideways
  return pre;
}

/** `code` in a line, as code. */
const inlineOf = (text: string): (string | Node)[] =>
  text.split(/`([^`\n]+)`/).map((part, at) => (at % 2 === 1 ? make("code", "", part) : part));
