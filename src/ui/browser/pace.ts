/** How long an answer is, and how fast it came. */
export class Pace {
  readonly #began = performance.now();
  #first: number | undefined;
  #last = 0;
  #parts = 0;

  /** A part with text has come: about a token. */
  count(): void {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#parts++;
  }

  /** Parts with text so far. */
  get parts(): number {
    return this.#parts;
  }

  /** `tokens`: how many there were, once the head has said so. */
  facts(tokens: number | undefined): string[] {
    const count = tokens ?? this.#parts;
    const length = count === 0 ? [] : [`${count} token${count === 1 ? "" : "s"}`];
    if (this.#first === undefined) return length;
    const seconds = (this.#last - this.#first) / 1000;
    return [
      ...length,
      ...(count > 1 && seconds > 0 ? [`${((count - 1) / seconds).toFixed(1)} tokens/s`] : []),
      `the first after ${duration(this.#first - this.#began)}`,
    ];
  }
}

const duration = (ms: number): string => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
