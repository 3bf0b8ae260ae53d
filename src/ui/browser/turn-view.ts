import { make, setText } from "./dom.ts";
import { TextView } from "./text-view.ts";

/** A button that may help. */
export interface Way {
  readonly name: string;
  readonly go: () => void;
}

/** A turn of the conversation: who, what, and in small print how it went. */
export class TurnView {
  readonly element: HTMLElement;
  readonly #text = new TextView();
  readonly #facts = make("p", "facts");

  constructor(kind: "user" | "assistant", who: string) {
    this.element = make("article", `turn ${kind}`, make("h2", "", who), this.#text.element, this.#facts);
  }

  show(text: string): void {
    this.#text.show(text.trimStart()); // many an answer begins with the space behind "assistant:"
  }

  set facts(text: string) {
    setText(this.#facts, text);
  }

  /** Whether more is to come. */
  set isGrowing(growing: boolean) {
    this.element.classList.toggle("growing", growing);
    this.element.setAttribute("aria-busy", String(growing));
  }

  showProblem(message: string, code: string, ways: readonly Way[]): void {
    const buttons = ways.map(({ name, go }) => {
      const button = make("button", "", name);
      button.type = "button";
      button.addEventListener("click", go);
      return button;
    });
    const problem = make("div", "problem", make("p", "", message), make("p", "", make("code", "", code)), ...buttons);
    problem.setAttribute("role", "alert");
    this.element.append(problem);
  }
}
