const SLOT_MS = 500;
const SLOTS = 10;

/** Counts tokens, and tells how many a second there were over the last 4.5 to 5 seconds. */
export class TokenMeter {
  readonly #now: () => number;
  /** Tokens of each half second that had some, the latest one last. */
  readonly #slots: { readonly at: number; tokens: number }[] = [];

  /** `now`: milliseconds from anywhere. */
  constructor(now: () => number = () => performance.now()) {
    this.#now = now;
  }

  count(tokens: number): void {
    const at = this.#slot();
    const last = this.#slots.at(-1);
    if (last?.at === at) last.tokens += tokens;
    else this.#slots.push({ at, tokens });
    this.#forget(at);
  }

  get perSecond(): number {
    const at = this.#slot();
    this.#forget(at);
    const tokens = this.#slots.reduce((sum, slot) => sum + slot.tokens, 0);
    return tokens / (((SLOTS - 1) * SLOT_MS + (this.#now() % SLOT_MS)) / 1000); // the present slot is not over yet
  }

  #slot(): number {
    return Math.floor(this.#now() / SLOT_MS);
  }

  #forget(at: number): void {
    while (this.#slots.length > 0 && this.#slots[0]!.at <= at - SLOTS) this.#slots.shift();
  }
}
