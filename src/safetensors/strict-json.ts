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
  const reader = new Reader(text);
  const value = reader.value(0);
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

class Reader {
  #at = 0;

  constructor(readonly text: string) {}

  value(depth: number): Json {
    if (depth > MAX_DEPTH) throw this.#error(`nesting deeper than ${MAX_DEPTH}`);
    this.#skipSpace();
    switch (this.text[this.#at]) {
      case "{":
        return this.#object(depth);
      case "[":
        return this.#array(depth);
      case '"':
        return this.#string();
      default: {
        const word = this.#word();
        return word === undefined ? this.#number() : word;
      }
    }
  }

  end(): void {
    this.#skipSpace();
    if (this.#at < this.text.length) throw this.#error("something follows the JSON value");
  }

  #object(depth: number): JsonObject {
    const members: [string, Json][] = [];
    this.#at++;
    if (this.#take("}")) return new JsonObject(members);
    do {
      this.#skipSpace();
      const key = this.#string();
      this.#expect(":");
      members.push([key, this.value(depth + 1)]);
    } while (this.#take(","));
    this.#expect("}");
    return new JsonObject(members);
  }

  #array(depth: number): Json[] {
    const items: Json[] = [];
    this.#at++;
    if (this.#take("]")) return items;
    do items.push(this.value(depth + 1));
    while (this.#take(","));
    this.#expect("]");
    return items;
  }

  #string(): string {
    PLAIN_STRING.lastIndex = this.#at;
    const plainLength = PLAIN_STRING.exec(this.text)?.[0].length;
    if (plainLength === undefined) return this.#escapedString();
    const start = this.#at + 1;
    this.#at += plainLength;
    return this.text.slice(start, this.#at - 1);
  }

  #escapedString(): string {
    if (this.text[this.#at] !== '"') throw this.#error("a string was expected");
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
    NUMBER.lastIndex = this.#at;
    const literal = NUMBER.exec(this.text)?.[0];
    if (literal === undefined) throw this.#error("a value was expected");
    this.#at += literal.length;
    const value = Number(literal);
    return /^\d+$/.test(literal) && Number.isSafeInteger(value) ? value : new NumberLiteral(literal);
  }

  #take(character: string): boolean {
    this.#skipSpace();
    if (this.text[this.#at] !== character) return false;
    this.#at++;
    return true;
  }

  #expect(character: string): void {
    if (!this.#take(character)) throw this.#error(`"${character}" was expected`);
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
// oxlint-disable-next-line no-control-regex -- JSON allows no control character in a string
const PLAIN_STRING = /"[^"\\\u0000-\u001f]*"/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const isSpace = (code: number) => code === 0x20 || code === 0x0a || code === 0x0d || code === 0x09;
