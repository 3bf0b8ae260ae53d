/**
 * A pass that reads prompts beside conversations takes up to this many times one of conversations alone, by what is known of
 * both. Nobody shall wait three times as long; the rest is room for what is known badly.
 */
const MOST_SLOWDOWN = 2.25;
/** Prompt tokens of such a pass while nothing has been measured. */
const FIRST_TOKENS = 16;
/**
 * A pass cannot be called back: whoever hangs up, has a deadline or stops the node waits for its end. On a device that
 * computes on the CPU 512 tokens may take minutes.
 */
const MOST_PASS_MS = 4_000;
/** A conversation that said nothing for so long is not waited for. */
const PAUSE_MS = 2_000;
/** Weight of the newest measurement. */
const NEWEST = 0.3;

/**
 * How many prompt tokens a pass may take: beside conversations so few that these do not stall, and never more than a few
 * seconds' worth. Learned from how long passes take on this device.
 */
export class Pace {
  readonly #now: () => number;
  readonly #rowStep: number;
  #conversationMs: number | undefined;
  #promptTokenMs: number | undefined;
  #lastConversationAt = -Infinity;

  /**
   * `now`: milliseconds of any clock that only goes forward. `rowStep`: rows that the device takes together, so that each
   * of them costs as much as all; a pass is filled up to a multiple of it, and has one prompt token at least.
   */
  constructor(now: () => number, rowStep = 1) {
    this.#now = now;
    this.#rowStep = rowStep;
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

  /** Prompt tokens that the next pass may take beside `singles` tokens of conversations. */
  promptTokens(singles: number): number {
    const pauseMs = Math.max(PAUSE_MS, 4 * (this.#conversationMs ?? 0));
    const isQuiet = singles === 0 && this.#now() - this.#lastConversationAt > pauseMs;
    if (this.#promptTokenMs === undefined) return FIRST_TOKENS;
    if (!isQuiet && this.#conversationMs === undefined) return FIRST_TOKENS;
    const spareMs = isQuiet ? MOST_PASS_MS : Math.min((MOST_SLOWDOWN - 1) * this.#conversationMs!, MOST_PASS_MS);
    const tokens = Math.floor(spareMs / this.#promptTokenMs);
    const least = this.#rowStep - (singles % this.#rowStep);
    return Math.max(least, tokens - ((singles + tokens) % this.#rowStep));
  }
}

const mix = (before: number | undefined, newest: number): number =>
  before === undefined ? newest : before + NEWEST * (newest - before);
