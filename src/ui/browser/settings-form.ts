import type { Settings } from "./conversation.ts";
import { byId } from "./dom.ts";

/** Tokens of an answer, unless half the context is less: the chain keeps room for as many while it writes. */
const USUAL_TOKENS = 512;

/** What the user sets, and what holds where they leave a field empty. */
export class SettingsForm {
  readonly #details = byId("settings", HTMLDetailsElement);
  readonly #system = byId("system", HTMLTextAreaElement);
  readonly #temperature = byId("temperature", HTMLInputElement);
  readonly #maxTokens = byId("max-tokens", HTMLInputElement);
  #maxContext = 0;

  constructor() {
    // What is hidden cannot be corrected.
    this.#details.addEventListener("invalid", () => (this.#details.open = true), { capture: true });
  }

  /** The context of the model, in tokens. */
  set maxContext(tokens: number) {
    this.#maxContext = tokens;
    this.#maxTokens.placeholder = String(this.#usualTokens);
  }

  read(): Settings {
    const isFree = this.#maxTokens.value === "";
    return {
      system: this.#system.value.trim(),
      temperature: this.#temperature.value === "" ? undefined : this.#temperature.valueAsNumber,
      maxTokens: isFree ? this.#usualTokens : this.#maxTokens.valueAsNumber,
      mayBeFewer: isFree,
    };
  }

  get #usualTokens(): number {
    return Math.min(USUAL_TOKENS, Math.floor(this.#maxContext / 2));
  }
}
