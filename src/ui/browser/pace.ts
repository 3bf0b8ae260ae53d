/** Parts that come so soon after the first one waited with it somewhere. */
const TOGETHER_MS = 5;

/** How long an answer is, and how fast it came. */
export class Pace {
  readonly #began = performance.now();
  #first: number | undefined;
  #last = 0;
  #parts = 0;
  /** What came with the first part says nothing of how fast the next ones come. */
  #head = { at: 0, parts: 0 };

  /** A part with text has come: about a token. */
  count(): void {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#parts++;
    if (this.#last - this.#first < TOGETHER_MS) this.#head = { at: this.#last, parts: this.#parts };
  }

  /** `tokens`: how many there were, once the head has said so. */
  facts(tokens: number | undefined): string[] {
    const count = tokens ?? this.#parts;
    const length = count === 0 ? [] : [`${count} token${count === 1 ? "" : "s"}`];
    if (this.#first === undefined) return length;
    const seconds = (this.#last - this.#head.at) / 1000;
    const timed = count - this.#head.parts;
    return [
      ...length,
      ...(timed > 0 && seconds > 0 ? [`${(timed / seconds).toFixed(1)} tokens/s`] : []),
      `the first after ${duration(this.#first - this.#began)}`,
    ];
  }
}

const duration = (ms: number): string => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
