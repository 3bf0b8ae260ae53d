import {
  ArrayValue,
  BooleanValue,
  FunctionValue,
  IntegerValue,
  isArray,
  isString,
  pythonString,
  StringValue,
  type Value,
} from "./jinja-values.ts";

/** The method of a string by its name in Python, as far as the library lacks it or gets it wrong. */
export function stringMethod(text: string, name: string): Value | undefined {
  const method = Object.hasOwn(METHODS, name) ? METHODS[name] : undefined;
  return method && new FunctionValue((args: Value[]) => method(text, args.map(plain)));
}

/** `| trim`, and `strip()`: Python's spaces, or the given characters, from both ends. */
export const strip = (text: string, characters?: string): string => rstrip(lstrip(text, characters), characters);

const lstrip = (text: string, characters?: string): string => text.slice(spaces(text, characters, 1));
const rstrip = (text: string, characters?: string): string => text.slice(0, text.length - spaces(text, characters, -1));

export function capitalize(text: string): string {
  const [first = "", ...rest] = text;
  return first.toUpperCase() + rest.join("").toLowerCase();
}

/** `"they're".title()` is "They'Re". */
export const title = (text: string): string => text.replace(/\p{L}+/gu, capitalize);

/** Code units at the beginning (or the end) of the text that are spaces, or among the characters. */
function spaces(text: string, characters: string | undefined, direction: 1 | -1): number {
  const set = characters === undefined ? undefined : new Set(characters);
  const isOut = (character: string) => (set ? set.has(character) : isPythonSpace(character));
  let count = 0;
  while (count < text.length) {
    const character = direction === 1 ? characterFrom(text, count) : characterBefore(text, text.length - count);
    if (!isOut(character)) break;
    count += character.length;
  }
  return count;
}

const characterFrom = (text: string, at: number): string => String.fromCodePoint(text.codePointAt(at)!);

function characterBefore(text: string, end: number): string {
  const pair = end > 1 ? text.codePointAt(end - 2)! : 0;
  return pair > 0xffff ? String.fromCodePoint(pair) : text[end - 1]!;
}

/** As `str.isspace` has it: U+FEFF is none, and the four separators from U+001C on are. */
const isPythonSpace = (character: string): boolean =>
  (character >= "\u001c" && character <= "\u001f") || /^[\p{White_Space}]$/u.test(character);

type Argument = string | number | readonly Value[] | null | undefined;

function plain(value: Value): Argument {
  if (isString(value)) return value.value;
  if (isArray(value)) return value.value;
  if (value.type === "NullValue") return null;
  if (value.type === "IntegerValue") return value.value as number;
  throw new Error(`a string's method was given a ${value.type}`);
}

const METHODS: Record<string, (text: string, args: Argument[]) => Value> = {
  strip: (text, [characters]) => new StringValue(strip(text, optionalText(characters))),
  lstrip: (text, [characters]) => new StringValue(lstrip(text, optionalText(characters))),
  rstrip: (text, [characters]) => new StringValue(rstrip(text, optionalText(characters))),
  capitalize: (text) => new StringValue(capitalize(text)),
  title: (text) => new StringValue(title(text)),
  removeprefix: (text, [prefix]) => {
    const start = requiredText(prefix);
    return new StringValue(text.startsWith(start) ? text.slice(start.length) : text);
  },
  removesuffix: (text, [suffix]) => {
    const end = requiredText(suffix);
    return new StringValue(end !== "" && text.endsWith(end) ? text.slice(0, -end.length) : text);
  },
  count: (text, [part]) => {
    const wanted = requiredText(part);
    return new IntegerValue(wanted === "" ? [...text].length + 1 : text.split(wanted).length - 1);
  },
  find: (text, [part]) => new IntegerValue(characterIndex(text, text.indexOf(requiredText(part)))),
  rfind: (text, [part]) => new IntegerValue(characterIndex(text, text.lastIndexOf(requiredText(part)))),
  isdigit: (text) => new BooleanValue(/^[\p{Nd}²³¹⁰⁴-⁹₀-₉]+$/u.test(text)),
  isalpha: (text) => new BooleanValue(/^\p{L}+$/u.test(text)),
  isspace: (text) => new BooleanValue(text !== "" && strip(text) === ""),
  splitlines: (text) => {
    const lines = text.split(LINE_END);
    if (lines.at(-1) === "") lines.pop();
    return new ArrayValue(lines.map((line) => new StringValue(line)));
  },
  join: (text, [items]) => {
    if (typeof items !== "object" || items === null) throw new Error("join() takes a list");
    return new StringValue(items.map(pythonString).join(text));
  },
};

/** As `str.splitlines` has them. */
const LINE_END = new RegExp(["\r\n", ..."\n\v\f\r\u001c\u001d\u001e\u0085\u2028\u2029"].join("|"));

/** In characters, of an index in code units. */
const characterIndex = (text: string, at: number): number => (at < 0 ? -1 : Array.from(text.slice(0, at)).length);

function optionalText(argument: Argument): string | undefined {
  return argument === undefined || argument === null ? undefined : requiredText(argument);
}

function requiredText(argument: Argument): string {
  if (typeof argument === "string") return argument;
  throw new Error("a string's method takes a string");
}
