/**
 * Finds the first stop string in text that comes in pieces. The text ends before the first place where any stop string is
 * complete; where several are complete at once, before the longest. So the result depends on the text alone, not on its
 * pieces. What could be the beginning of a stop string is held back, and nothing else.
 */
export class StopMatcher {
  readonly #stops: readonly PrefixTracker[];
  #held = "";
  #stopped: string | undefined;

  /** `stops`: none of them empty, or an error that names it. None at all: nothing is held back. */
  constructor(stops: readonly string[]) {
    this.#stops = [...new Set(stops)].map((stop) => new PrefixTracker(stop));
  }

  /** The stop string that ended the text. */
  get stopped(): string | undefined {
    return this.#stopped;
  }

  /** What of the text may be given out now. After a stop string it is always empty. */
  push(piece: string): string {
    if (this.#stopped !== undefined) return "";
    const text = this.#held + piece;
    for (let at = this.#held.length; at < text.length; at++) {
      const code = text.charCodeAt(at);
      let complete: string | undefined;
      for (const stop of this.#stops) {
        if (stop.advance(code) && stop.text.length > (complete?.length ?? 0)) complete = stop.text;
      }
      if (complete === undefined) continue;
      this.#stopped = complete;
      this.#held = "";
      return text.slice(0, at + 1 - complete.length);
    }
    const held = this.#stops.reduce((longest, { matched }) => Math.max(longest, matched), 0);
    this.#held = text.slice(text.length - held);
    return text.slice(0, text.length - held);
  }

  /** What was held back, where the text ends without a stop string. Then the matcher is as new, but for `stopped`. */
  end(): string {
    const rest = this.#held;
    this.#held = "";
    for (const stop of this.#stops) stop.matched = 0;
    return rest;
  }
}

/** How much of one string the text so far ends with (Knuth, Morris, Pratt): constant work per character. */
class PrefixTracker {
  /** So many of its first code units end the text. */
  matched = 0;
  /** For a prefix of length i + 1: the longest shorter prefix that it ends with. */
  readonly #fallback: Uint32Array;

  constructor(readonly text: string) {
    if (text === "") throw new RangeError("a stop string is empty: it would end every text before it begins");
    this.#fallback = new Uint32Array(text.length);
    for (let at = 1; at < text.length; at++) {
      this.#fallback[at] = this.#follow(this.#fallback[at - 1]!, text.charCodeAt(at));
    }
  }

  /** Whether the text now ends with the whole string. */
  advance(code: number): boolean {
    this.matched = this.#follow(this.matched, code);
    return this.matched === this.text.length;
  }

  #follow(matched: number, code: number): number {
    while (matched > 0 && this.text.charCodeAt(matched) !== code) {
      matched = this.#fallback[matched - 1]!;
    }
    return this.text.charCodeAt(matched) === code ? matched + 1 : 0;
  }
}
