import { UserError } from "../base/errors.ts";
import type { TextEvent } from "./head-client.ts";

/** A time, in milliseconds of `performance.now`. */
export interface Span {
  readonly begin: number;
  readonly end: number;
}

/** So many texts in a row without a single piece: nothing can be timed with this model. */
const MOST_EMPTY = 8;

/** Texts that are made side by side until they are told to stop: where one ends by itself, a new one takes its place. */
export class LoadRun {
  /** Rejects when a text could not be made. */
  readonly failure: Promise<never>;
  /** Of each session: milliseconds to the first piece of its first text. */
  readonly firstMs: (number | undefined)[];
  /** Between two pieces of one text. */
  readonly #gaps: Span[] = [];
  readonly #control = new AbortController();
  readonly #workers: readonly Promise<void>[];
  #piece = Promise.withResolvers<void>();

  constructor(sessions: number, text: (signal: AbortSignal) => AsyncIterable<TextEvent>, signal: AbortSignal) {
    const whole = AbortSignal.any([signal, this.#control.signal]);
    this.firstMs = Array.from({ length: sessions });
    this.#workers = this.firstMs.map((_, session) => this.#work(session, () => text(whole)));
    const failed = Promise.withResolvers<never>();
    for (const worker of this.#workers) worker.catch(failed.reject);
    this.failure = failed.promise;
    this.failure.catch(() => {}); // whoever waits for something is told
  }

  /** Resolves when something is so, which is looked at with each piece. */
  async until(isSo: () => boolean): Promise<void> {
    while (!isSo()) await Promise.race([this.#piece.promise, this.failure]);
  }

  /** The gaps that lie within a time. */
  within({ begin, end }: Span): Span[] {
    return this.#gaps.filter((gap) => gap.begin >= begin && gap.end <= end);
  }

  /** The gaps that a time touches. */
  touching({ begin, end }: Span): Span[] {
    return this.#gaps.filter((gap) => gap.end > begin && gap.begin < end);
  }

  /** When the last gap ended. */
  get lastAt(): number {
    return this.#gaps.at(-1)?.end ?? -Infinity;
  }

  async stop(): Promise<void> {
    this.#control.abort(new Error("measured"));
    await Promise.allSettled(this.#workers);
  }

  async #work(session: number, text: () => AsyncIterable<TextEvent>): Promise<void> {
    for (let empty = 0; empty < MOST_EMPTY; empty++) {
      const asked = performance.now();
      let last: number | undefined;
      for await (const piece of text()) {
        if (piece.text === "") continue;
        const now = performance.now();
        if (last === undefined) this.firstMs[session] ??= now - asked;
        else this.#gaps.push({ begin: last, end: now });
        last = now;
        this.#piece.resolve();
        this.#piece = Promise.withResolvers();
      }
      if (last !== undefined) empty = -1;
    }
    throw new UserError(
      "not_supported",
      `${MOST_EMPTY} texts in a row ended before they began: this model ends texts at once`,
      "measure with another model",
    );
  }
}
