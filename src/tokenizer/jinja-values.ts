import { Environment, Interpreter } from "@huggingface/jinja";

/** A value while a template runs. The library exports neither its types nor its classes; these are what it makes. */
export interface Value {
  readonly type: string;
  readonly value: unknown;
  readonly builtins: ReadonlyMap<string, Value>;
}

type Constructor = new (value?: unknown) => Value;

const classOf = (value: unknown): Constructor => new Environment().set("value", value).constructor as Constructor;

export const StringValue = classOf("");
export const IntegerValue = classOf(1);
export const FloatValue = classOf(0.5);
export const BooleanValue = classOf(true);
export const NullValue = classOf(null);
export const UndefinedValue = classOf(undefined);
export const ArrayValue = classOf([]);
export const ObjectValue = classOf({});
export const FunctionValue = classOf(() => null);

/** What `{% break %}` and `{% continue %}` throw. */
export const [BreakControl, ContinueControl] = ["Break", "Continue"].map((type) => {
  try {
    new Interpreter().evaluate({ type }, new Environment());
  } catch (control) {
    return (control as Error).constructor as new () => Error;
  }
  throw new Error(`@huggingface/jinja has no control flow by exceptions for ${type}`);
}) as [new () => Error, new () => Error];

export const isString = (value: Value): value is Value & { value: string } => value instanceof StringValue;
export const isArray = (value: Value): value is Value & { value: Value[] } => value instanceof ArrayValue;
export const isObject = (value: Value): value is Value & { value: Map<string, Value> } => value instanceof ObjectValue;

const isNumber = ({ type }: Value): boolean => /^(Integer|Float|Boolean)Value$/.test(type);

/** Python's `str`, as `{{ … }}`, `~` and `| string` use it. */
export function pythonString(value: Value): string {
  return isString(value) ? value.value : value.type === "UndefinedValue" ? "" : pythonRepr(value);
}

function pythonRepr(value: Value): string {
  if (isString(value)) return quoted(value.value);
  if (isArray(value)) {
    const items = value.value.map(pythonRepr).join(", ");
    if (value.type !== "TupleValue") return `[${items}]`;
    return value.value.length === 1 ? `(${items},)` : `(${items})`;
  }
  if (isObject(value))
    return `{${[...value.value].map(([key, item]) => `${quoted(key)}: ${pythonRepr(item)}`).join(", ")}}`;
  switch (value.type) {
    case "NullValue":
      return "None";
    case "UndefinedValue":
      return "Undefined";
    case "BooleanValue":
      return value.value ? "True" : "False";
    case "IntegerValue":
    case "FloatValue":
      return String(value);
    default:
      throw new Error(`a ${value.type} cannot be written as text`);
  }
}

function quoted(text: string): string {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escapes: Record<string, string> = {
    "\\": "\\\\",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    [quote]: `\\${quote}`,
  };
  const body = text.replace(/[\\'"]|[\p{C}\p{Z}]/gu, (character) => {
    if (character === " ") return character;
    const code = character.codePointAt(0)!;
    if (escapes[character]) return escapes[character];
    if (character === "'" || character === '"') return character;
    if (code <= 0xff) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code <= 0xffff ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
  return `${quote}${body}${quote}`;
}

/** Python's `==`. */
export function equals(a: Value, b: Value): boolean {
  if (isNumber(a) && isNumber(b)) return Number(a.value) === Number(b.value);
  if (isArray(a) && isArray(b)) {
    return a.value.length === b.value.length && a.value.every((item, index) => equals(item, b.value[index]!));
  }
  if (isObject(a) && isObject(b)) {
    const other = b.value;
    return (
      a.value.size === other.size &&
      [...a.value].every(([key, item]) => other.has(key) && equals(item, other.get(key)!))
    );
  }
  return a.type === b.type && a.value === b.value;
}

/** Python's `in`. */
export function contains(container: Value, item: Value): boolean {
  if (isArray(container)) return container.value.some((other) => equals(other, item));
  if (container.type === "UndefinedValue") return false;
  if (isString(item) && isString(container)) return container.value.includes(item.value);
  if (isString(item) && isObject(container)) return container.value.has(item.value);
  throw new Error(`${item.type} in ${container.type} is not possible`);
}
