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

  /** For a conversation of so many tokens, at most. */
  read(tokens: number): Settings {
    const isRoom = tokens + mostTokens(this.#system.value) + this.#usualTokens <= this.#maxContext;
    const usual = isRoom ? this.#usualTokens : undefined; // the head knows what is left
    return {
      system: this.#system.value.trim(),
      temperature: this.#temperature.value === "" ? undefined : this.#temperature.valueAsNumber,
      maxTokens: this.#maxTokens.value === "" ? usual : this.#maxTokens.valueAsNumber,
    };
  }

  get #usualTokens(): number {
    return Math.min(USUAL_TOKENS, Math.floor(this.#maxContext / 2));
  }
}

/** For what a chat template writes around a text. */
const TEMPLATE_TOKENS = 32;

/** The tokens of a text: each is at least a byte. */
export const mostTokens = (text: string): number => new TextEncoder().encode(text).length + TEMPLATE_TOKENS;
