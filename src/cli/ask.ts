import { createInterface, type Interface } from "node:readline";
import { UserError } from "../base/errors.ts";

/** Reads what a person types at a terminal, line by line. */
export class Prompter {
  /** Lines that came together with one that was asked for: somebody pasted them. */
  #pasted: string[] = [];
  /** What was pasted behind the last line break. */
  #begun = "";

  /** The next line; undefined at Ctrl-D, or at the second Ctrl-C. The first one clears the line. */
  async ask(prompt: string, history: readonly string[]): Promise<string | undefined> {
    if (this.#pasted.length > 0) {
      const line = this.#pasted.shift()!;
      process.stdout.write(`${prompt}${line}\n`);
      return line;
    }
    const { promise, resolve } = Promise.withResolvers<string | undefined>();
    // For each question anew: while nothing is asked the terminal is as always, and Ctrl-C a signal.
    const typed = createInterface({ input: process.stdin, output: process.stdout, prompt, history: [...history] });
    typed.on("line", (line) => {
      if (this.#pasted.push(line) > 1) return;
      // Not before the others have been seen that came with it.
      setImmediate(() => {
        this.#begun = typed.line;
        if (this.#begun !== "") process.stdout.write("\n"); // it is shown again behind the next prompt
        resolve(this.#pasted.shift());
        typed.close();
      });
    });
    typed.on("SIGINT", clearing(typed));
    typed.on("SIGTSTP", () => stopHere(typed));
    typed.on("close", () => resolve(undefined));
    typed.prompt();
    if (this.#begun !== "") typed.write(this.#begun);
    this.#begun = "";
    return promise;
  }

  /** Drops what was pasted and not asked for yet. */
  forget(): void {
    this.#pasted = [];
    this.#begun = "";
  }
}

function clearing(typed: Interface): () => void {
  let isWarned = false;
  return () => {
    if (isWarned && typed.line === "") return typed.close();
    isWarned = true;
    process.stdout.write(typed.line === "" ? "\n(Ctrl-C once more, or Ctrl-D, ends)\n" : "\n");
    typed.write(null, { ctrl: true, name: "e" });
    typed.write(null, { ctrl: true, name: "u" });
    typed.prompt();
  };
}

/** As the terminal does at Ctrl-Z while nothing is asked. Bun's own way leaves a terminal that takes no key any more. */
function stopHere(typed: Interface): void {
  process.stdin.setRawMode(false);
  process.kill(process.pid, "SIGTSTP");
  // When it is continued; or at once where no shell waits for it, as in a container: then it is not stopped at all.
  setTimeout(() => {
    process.stdin.setRawMode(true);
    typed.prompt(true);
  }, 50);
}

/** What comes on stdin, line by line. Throws UserError `bad_usage` at the first line that is no UTF-8. */
export async function* lines(chunks: AsyncIterable<Uint8Array> = process.stdin): AsyncGenerator<string> {
  let number = 0;
  for await (const bytes of byteLines(chunks)) {
    number++;
    let line: string;
    try {
      line = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch (cause) {
      throw new UserError("bad_usage", `line ${number} of stdin is not text in UTF-8`, "convert it first", { cause });
    }
    yield line.replace(/\r$/, "");
  }
}

/** Line breaks end lines, and are not part of them; so does the end. */
async function* byteLines(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  let parts: Uint8Array[] = [];
  for await (const chunk of chunks) {
    let from = 0;
    for (let to = chunk.indexOf(LINE_FEED); to >= 0; to = chunk.indexOf(LINE_FEED, from)) {
      yield Buffer.concat([...parts, chunk.subarray(from, to)]);
      parts = [];
      from = to + 1;
    }
    if (from < chunk.length) parts.push(chunk.slice(from));
  }
  if (parts.length > 0) yield Buffer.concat(parts);
}

const LINE_FEED = 10;
