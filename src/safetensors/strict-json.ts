/**
 * JSON as a validator wants it. `JSON.parse` keeps the last of two equal keys, reads `4.0` and `4e0` as 4 and rounds
 * beyond 2^53; here an object is the list of its members in order, and a number that is not a plain safe integer stays
 * a `NumberLiteral`, so `typeof value === "number"` says everything.
 */
export type Json = string | number | boolean | null | NumberLiteral | Json[] | JsonObject;

/** `-1`, `4.0`, `4e0`, `9007199254740993`: valid JSON that counts nothing here. */
export class NumberLiteral {
  constructor(readonly text: string) {}
}

export class JsonObject {
  constructor(readonly members: readonly (readonly [key: string, value: Json])[]) {}
}

/** The depth serde_json stops at, in the reference implementation. */
const MAX_DEPTH = 128;

/** Throws SyntaxError with the character's position. */
export function parseJson(text: string): Json {
  const reader = new JsonReader(text);
  const value = reader.value();
  reader.end();
  return value;
}

/** A value as it stood in the text, cut to what fits in an error message. */
export function showJson(value: Json | undefined): string {
  const text = JSON.stringify(plain(value)) ?? "nothing";
  return text.length > 100 ? `${text.slice(0, 97)}...` : text;
}

function plain(value: Json | undefined): unknown {
  if (value instanceof NumberLiteral) return value.text;
  if (value instanceof JsonObject)
    return Object.fromEntries(value.members.map(([key, member]) => [key, plain(member)]));
  if (Array.isArray(value)) return value.map(plain);
  return value;
}

/**
 * Reads a text value by value, in its order, so that a large one need never be in memory as a whole. Each method throws
 * SyntaxError with the character's position.
 */
export class JsonReader {
  #at = 0;
  #depth = 0;
  /** How many values `value` may still build. */
  #budget = Number.POSITIVE_INFINITY;

  constructor(readonly text: string) {}

  /** Whether the next value is an object. */
  isObject(): boolean {
    this.#skipSpace();
    return this.text.charCodeAt(this.#at) === OPEN_BRACE;
  }

  /** Goes through an object; `member` reads or skips the value of each key. */
  object(member: (key: string) => void): void {
    this.#open("{");
    if (!this.#take(CLOSE_BRACE)) {
      do {
        this.#skipSpace();
        const key = this.#string();
        this.#expect(":");
        member(key);
      } while (this.#take(COMMA));
      this.#expect("}");
    }
    this.#depth--;
  }

  /** The next value, with all that is in it: refused where that is more than `most` values. */
  value(most = Number.POSITIVE_INFINITY): Json {
    this.#budget = most;
    return this.#value();
  }

  /** Checks the next value and forgets it. */
  skip(): void {
    this.#skipSpace();
    switch (this.text.charCodeAt(this.#at)) {
      case OPEN_BRACE:
        return this.object(() => this.skip());
      case OPEN_BRACKET:
        return this.#list(() => this.skip());
      default:
        this.#scalar();
    }
  }

  end(): void {
    this.#skipSpace();
    if (this.#at < this.text.length) throw this.#error("something follows the JSON value");
  }

  #value(): Json {
    if (this.#budget-- <= 0) throw this.#error("more values than can stand here");
    this.#skipSpace();
    switch (this.text.charCodeAt(this.#at)) {
      case OPEN_BRACE: {
        const members: [string, Json][] = [];
        this.object((key) => members.push([key, this.#value()]));
        return new JsonObject(members);
      }
      case OPEN_BRACKET: {
        const items: Json[] = [];
        this.#list(() => items.push(this.#value()));
        return items;
      }
      default:
        return this.#scalar();
    }
  }

  #list(item: () => void): void {
    this.#open("[");
    if (!this.#take(CLOSE_BRACKET)) {
      do item();
      while (this.#take(COMMA));
      this.#expect("]");
    }
    this.#depth--;
  }

  #open(bracket: "{" | "["): void {
    this.#expect(bracket);
    if (++this.#depth > MAX_DEPTH) throw this.#error(`nesting deeper than ${MAX_DEPTH}`);
  }

  #scalar(): string | boolean | null | number | NumberLiteral {
    if (this.text.charCodeAt(this.#at) === QUOTE) return this.#string();
    const word = this.#word();
    return word === undefined ? this.#number() : word;
  }

  #string(): string {
    if (this.text.charCodeAt(this.#at) !== QUOTE) throw this.#error("a string was expected");
    const start = this.#at + 1;
    for (let end = start; ; end++) {
      const code = this.text.charCodeAt(end);
      if (code === QUOTE) {
        this.#at = end + 1;
        return this.text.slice(start, end);
      }
      if (!(code >= SPACE) || code === BACKSLASH || code >= FIRST_SURROGATE) return this.#unusualString(); // or the end
    }
  }

  #unusualString(): string {
    let end = this.#at + 1;
    while (this.text[end] !== '"') {
      if (end >= this.text.length) throw this.#error("a string has no end");
      end += this.text[end] === "\\" ? 2 : 1;
    }
    let value: string;
    try {
      value = JSON.parse(this.text.slice(this.#at, end + 1));
    } catch {
      throw this.#error("a string with a bad escape or a control character");
    }
    if (!value.isWellFormed()) throw this.#error("a string with a lone surrogate");
    this.#at = end + 1;
    return value;
  }

  #word(): boolean | null | undefined {
    for (const [word, value] of WORDS) {
      if (!this.text.startsWith(word, this.#at)) continue;
      this.#at += word.length;
      return value;
    }
    return undefined;
  }

  #number(): number | NumberLiteral {
    return this.#shortNumber() ?? this.#anyNumber();
  }

  /** Up to 15 digits and nothing else: nearly every number there is. */
  #shortNumber(): number | undefined {
    const start = this.#at;
    let value = 0;
    let end = start;
    for (; end < start + 15; end++) {
      const digit = this.text.charCodeAt(end) - ZERO;
      if (!(digit >= 0 && digit <= 9)) break;
      value = value * 10 + digit;
    }
    const next = this.text.charCodeAt(end);
    const isWhole = next === COMMA || next === CLOSE_BRACKET || next === CLOSE_BRACE || isSpace(next);
    const hasLeadingZero = this.text.charCodeAt(start) === ZERO && end > start + 1;
    if (end === start || !isWhole || hasLeadingZero) return undefined;
    this.#at = end;
    return value;
  }

  #anyNumber(): number | NumberLiteral {
    NUMBER.lastIndex = this.#at;
    const literal = NUMBER.exec(this.text)?.[0];
    if (literal === undefined) throw this.#error("a value was expected");
    this.#at += literal.length;
    const value = Number(literal);
    return /^\d+$/.test(literal) && Number.isSafeInteger(value) ? value : new NumberLiteral(literal);
  }

  #take(code: number): boolean {
    this.#skipSpace();
    if (this.text.charCodeAt(this.#at) !== code) return false;
    this.#at++;
    return true;
  }

  #expect(character: string): void {
    if (!this.#take(character.charCodeAt(0))) throw this.#error(`"${character}" was expected`);
  }

  #skipSpace(): void {
    while (isSpace(this.text.charCodeAt(this.#at))) this.#at++;
  }

  #error(problem: string): SyntaxError {
    return new SyntaxError(`${problem} at character ${this.#at}`);
  }
}

const WORDS = [
  ["true", true],
  ["false", false],
  ["null", null],
] as const;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const isSpace = (code: number) => code === SPACE || code === 0x0a || code === 0x0d || code === 0x09;

const SPACE = 0x20;
const QUOTE = 0x22;
const COMMA = 0x2c;
const ZERO = 0x30;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;
const FIRST_SURROGATE = 0xd800;
