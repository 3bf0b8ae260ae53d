/** A pass that reads prompts beside conversations takes up to this many times one of conversations alone. */
const MOST_SLOWDOWN = 2.5;
/** Prompt tokens of such a pass while nothing has been measured, and in any case: kernels take many rows at once. */
const FIRST_TOKENS = 16;
const LEAST_TOKENS = 8;
/** A conversation that said nothing for so long is not waited for. */
const PAUSE_MS = 2_000;
/** Weight of the newest measurement. */
const NEWEST = 0.3;

/**
 * How many prompt tokens may share a pass with conversations, so that these do not stall: learned from how long passes
 * take on this device.
 */
export class Pace {
  readonly #now: () => number;
  #conversationMs: number | undefined;
  #promptTokenMs: number | undefined;
  #lastConversationAt = -Infinity;

  /** `now`: milliseconds of any clock that only goes forward. */
  constructor(now: () => number) {
    this.#now = now;
  }

  /** What a pass took that had so many single tokens of conversations, and so many tokens of prompts. */
  observe(singles: number, promptTokens: number, ms: number): void {
    if (singles > 0) this.#lastConversationAt = this.#now();
    if (promptTokens === 0) {
      this.#conversationMs = mix(this.#conversationMs, ms);
    } else {
      const prompts = singles > 0 ? ms - (this.#conversationMs ?? 0) : ms;
      this.#promptTokenMs = mix(this.#promptTokenMs, Math.max(prompts, 0.1 * ms) / promptTokens);
    }
  }

  /** Prompt tokens that the next pass may take beside `singles` tokens of conversations; Infinity where none goes on. */
  promptTokens(singles: number): number {
    const pauseMs = Math.max(PAUSE_MS, 4 * (this.#conversationMs ?? 0));
    if (singles === 0 && this.#now() - this.#lastConversationAt > pauseMs) return Infinity;
    if (this.#conversationMs === undefined || this.#promptTokenMs === undefined) return FIRST_TOKENS;
    const spareMs = (MOST_SLOWDOWN - 1) * this.#conversationMs;
    return Math.max(LEAST_TOKENS, Math.floor(spareMs / this.#promptTokenMs));
  }
}

const mix = (before: number | undefined, newest: number): number =>
  before === undefined ? newest : before + NEWEST * (newest - before);
