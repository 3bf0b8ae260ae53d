/**
 * Puts a mask into the spelling of tokens in texts that users write, so that what a template makes of these texts shows
 * which tokens the template wrote, and which a user. Also into what could become such a spelling beside other text: the
 * beginnings of tokens at a text's end, their ends at its beginning, and texts that are a part of one.
 */
export class SpellingMask {
  /** Whether a mask was put anywhere. */
  isUsed = false;
  readonly tokens: readonly string[];
  readonly #spelling: string;
  readonly #longest: number;

  /** `mask`: a character that is in none of the texts, see `unusedCharacter`. */
  constructor(
    tokens: readonly string[],
    readonly mask: string,
  ) {
    // A token of one character has no inside.
    this.tokens = tokens.filter((token) => [...token].length > 1).toSorted((a, b) => b.length - a.length);
    this.#spelling = this.tokens.map(RegExp.escape).join("|") || "(?!)";
    this.#longest = Math.max(0, ...this.tokens.map((token) => token.length));
  }

  /**
   * The value with masks in its texts, all the way down. A `role` or `type` that is a plain word stays: templates compare
   * these, and make markers of them on purpose.
   */
  deep<T>(value: T): T {
    if (typeof value === "string") return this.text(value) as T;
    if (Array.isArray(value)) return value.map((item: unknown) => this.deep(item)) as T;
    if (typeof value !== "object" || value === null) return value;
    const isName = (key: string, item: unknown) => /^(role|type)$/.test(key) && /^[A-Za-z]\w*$/.test(String(item));
    const entries = Object.entries(value).map(([key, item]: [string, unknown]) => [
      this.#whole(key),
      isName(key, item) ? item : this.deep(item),
    ]);
    return Object.fromEntries(entries) as T;
  }

  /** The tokens that a text spells, unmasked. */
  spelled(text: string): string[] {
    return text.match(new RegExp(this.#spelling, "g")) ?? [];
  }

  text(text: string): string {
    const at = new Set([...this.#insides(text), ...this.#edges(text)]);
    return this.#insert(text, at);
  }

  unmask(text: string): string {
    return text.replaceAll(this.mask, "");
  }

  /** A key is looked up by its name, so it is left alone unless it spells a token out. */
  #whole(key: string): string {
    return this.#insert(key, this.#insides(key));
  }

  /** Before the second character of every spelling. */
  #insides(text: string): Set<number> {
    const places = new Set<number>();
    for (const { index } of text.matchAll(new RegExp(`(?=${this.#spelling})`, "g"))) places.add(after(text, index));
    return places;
  }

  #edges(text: string): Set<number> {
    const places = new Set<number>();
    const most = Math.min(this.#longest, text.length);
    for (let length = 1; length <= most; length++) {
      const start = text.slice(0, length);
      const end = text.slice(-length);
      const begins = (token: string) => token.length > length && token.startsWith(end);
      const ends = (token: string) => token.length > length && token.endsWith(start);
      if (this.tokens.some(begins)) places.add(after(text, text.length - length));
      if (this.tokens.some(ends)) places.add(before(text, length));
    }
    if (text !== "" && text.length < this.#longest && this.tokens.some((token) => token.includes(text))) {
      places.add(after(text, 0));
    }
    return places;
  }

  #insert(text: string, places: ReadonlySet<number>): string {
    if (places.size === 0) return text;
    this.isUsed = true;
    let result = "";
    let last = 0;
    for (const at of [...places].toSorted((a, b) => a - b)) {
      result += text.slice(last, at) + this.mask;
      last = at;
    }
    return result + text.slice(last);
  }
}

/** Where the character that begins at `at` ends. */
const after = (text: string, at: number): number => at + (text.codePointAt(at)! > 0xffff ? 2 : 1);

/** Where the character that ends at `end` begins. */
const before = (text: string, end: number): number =>
  end > 1 && text.codePointAt(end - 2)! > 0xffff ? end - 2 : end - 1;

/** A character for private use that none of the texts has. There are 6,400, and nobody writes them all. */
export function unusedCharacter(texts: readonly string[]): string {
  for (let code = 0xe000; code <= 0xf8ff; code++) {
    const character = String.fromCharCode(code);
    if (!texts.some((text) => text.includes(character))) return character;
  }
  throw new Error("every character for private use is in the texts");
}
