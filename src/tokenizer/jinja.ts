import { Environment, Interpreter, parse, tokenize } from "@huggingface/jinja";
import { capitalize, strip, stringMethod, title } from "./jinja-strings.ts";
import {
  ArrayValue,
  BooleanValue,
  BreakControl,
  contains,
  ContinueControl,
  equals,
  IntegerValue,
  isArray,
  isObject,
  isString,
  pythonString,
  StringValue,
  type Value,
} from "./jinja-values.ts";
import { strftime } from "./strftime.ts";

/** `raise_exception(…)` in a template: what its author says of the conversation. */
export class TemplateRefusal extends Error {}

/** A template that would not end, or would write without end. */
export class TemplateLimit extends Error {}

export interface RenderLimits {
  /** Nodes of the template that are evaluated, and what they cost: long strings and lists cost more. */
  readonly steps: number;
  /** Of the text and of every string on the way, in UTF-16 code units. */
  readonly characters: number;
}

/** Five times what a conversation of a thousand messages needs; a second or two. */
export const RENDER_LIMITS: RenderLimits = { steps: 1_000_000, characters: 16_000_000 };

/**
 * A template in Jinja's language, as transformers sets it up (`chat_template_utils.py`): blocks trimmed, loop controls,
 * `raise_exception`, `strftime_now` (local time `now`), `tojson` of Python's `json.dumps`.
 */
export class JinjaTemplate {
  readonly #program: Node;

  /** Throws an Error where the source does not parse. */
  constructor(source: string) {
    this.#program = parse(tokenize(source, { lstrip_blocks: true, trim_blocks: true })) as unknown as Node;
  }

  /**
   * Throws `TemplateRefusal`, `TemplateLimit`, and an Error that says what the template does that is not possible here.
   */
  render(variables: Readonly<Record<string, unknown>>, now: Date, limits: RenderLimits = RENDER_LIMITS): string {
    const environment = new Environment();
    for (const [name, value] of Object.entries({ ...globals(now), ...variables })) environment.set(name, value);
    return new PythonInterpreter(environment, limits).run(this.#program).value as string;
  }
}

/** More rounds than any loop over messages has; the library would make a list of them all. */
const MOST_RANGE = 100_000;

function globals(now: Date): Record<string, unknown> {
  const constants = { true: true, True: true, false: false, False: false, none: null, None: null };
  return {
    ...constants,
    raise_exception(message: unknown) {
      throw new TemplateRefusal(String(message));
    },
    strftime_now: (format: string) => strftime(now, format),
    range(start: number, stop?: number, step = 1) {
      const [from, to] = stop === undefined ? [0, start] : [start, stop];
      if (step === 0) throw new Error("range() has a step of 0");
      const count = Math.max(0, Math.ceil((to - from) / step));
      if (count > MOST_RANGE)
        throw new TemplateLimit(`range() of ${count} numbers, and at most ${MOST_RANGE} are made`);
      return Array.from({ length: count }, (_, index) => from + index * step);
    },
  };
}

/** A node of the syntax tree, with the fields that are read here. */
interface Node {
  readonly type: string;
  readonly value?: unknown;
  readonly body?: readonly Node[];
  readonly operator?: { readonly value: string };
  readonly left?: Node;
  readonly right?: Node;
  readonly object?: Node;
  readonly property?: Node;
  readonly computed?: boolean;
  readonly callee?: Node;
  readonly args?: readonly Node[];
}

/** The library's methods that are overridden or called here; it declares them private. */
interface OpenInterpreter {
  run(program: Node): Value;
  evaluate(node: Node | undefined, environment: Environment): Value;
  evaluateBlock(statements: readonly Node[], environment: Environment): Value;
  evaluateFor(node: Node, environment: Environment): Value;
  evaluateBinaryExpression(node: Node, environment: Environment): Value;
  evaluateMemberExpression(node: Node, environment: Environment): Value;
  evaluateArguments(args: readonly Node[], environment: Environment): [Value[], Map<string, Value>];
  applyFilter(operand: Value, filter: Node, environment: Environment): Value;
}

const Library = Interpreter as unknown as new (environment: Environment) => OpenInterpreter;

/** A node that is a value already. */
const known = (value: Value): Node => ({ type: "KnownValue", value });

const CHARACTERS_PER_STEP = 256;
/** Nodes within nodes, counted through macros: before the stack ends. */
const MOST_DEPTH = 1000;
/** A round of a loop, in steps: the library makes a dozen objects for each. */
const ROUND_STEPS = 10;

const STATEMENTS = new Set(["Set", "If", "For", "Macro", "CallStatement", "FilterStatement", "Comment", "Program"]);

/** Puts right what @huggingface/jinja 0.5.11 does otherwise than jinja2, and counts. */
class PythonInterpreter extends Library {
  #steps = 0;
  #depth = 0;
  readonly #loopBodies = new WeakSet<readonly Node[]>();
  /** Of loops that a break has just ended: the text of the round that it ended, by the body. */
  readonly #broken = new Map<readonly Node[], string>();
  readonly #written = new WeakMap<Error, string>();

  constructor(
    environment: Environment,
    readonly limits: RenderLimits,
  ) {
    super(environment);
  }

  override evaluate(node: Node | undefined, environment: Environment): Value {
    if (node?.type === "KnownValue") return node.value as Value;
    if (++this.#depth > MOST_DEPTH) throw new TemplateLimit(`macros call each other more than ${MOST_DEPTH} deep`);
    try {
      const value = super.evaluate(node, environment);
      this.#charge(value);
      return value;
    } finally {
      this.#depth--;
    }
  }

  #charge(value: Value): void {
    const length = isString(value) || isArray(value) ? value.value.length : 0;
    if (isString(value) && length > this.limits.characters) {
      throw new TemplateLimit(`a text of ${length} characters, and at most ${this.limits.characters} are written`);
    }
    this.#steps += 1 + length / CHARACTERS_PER_STEP;
    if (this.#steps > this.limits.steps) throw new TemplateLimit(`more than ${this.limits.steps} steps`);
  }

  /** None, True and lists are written as Python writes them; a round of a loop has variables of its own. */
  override evaluateBlock(statements: readonly Node[], environment: Environment): Value {
    const isLoopBody = this.#loopBodies.has(statements);
    const scope = isLoopBody ? new Environment(environment) : environment;
    if (isLoopBody) this.#steps += ROUND_STEPS;
    let text = "";
    for (const statement of statements) {
      try {
        const value = this.evaluate(statement, scope);
        if (!STATEMENTS.has(statement.type)) text += pythonString(value);
        else if (isString(value)) text += value.value;
      } catch (control) {
        const kind = controlOf(control);
        if (kind === undefined) throw control;
        // What a round has written before it ends is written.
        const written = text + (this.#written.get(control as Error) ?? "");
        if (isLoopBody && kind === "continue") return new StringValue(written);
        if (isLoopBody) this.#broken.set(statements, written);
        else this.#written.set(control as Error, written);
        throw control;
      }
    }
    const value = new StringValue(text);
    this.#charge(value);
    return value;
  }

  override evaluateFor(node: Node, environment: Environment): Value {
    const { body = [] } = node;
    this.#loopBodies.add(body);
    const value = super.evaluateFor(node, environment);
    const last = this.#broken.get(body) ?? "";
    this.#broken.delete(body);
    return new StringValue((value.value as string) + last);
  }

  override evaluateBinaryExpression(node: Node, environment: Environment): Value {
    const operator = node.operator!.value;
    if (!["==", "!=", "~", "in", "not in"].includes(operator)) return super.evaluateBinaryExpression(node, environment);
    const left = this.evaluate(node.left, environment);
    const right = this.evaluate(node.right, environment);
    switch (operator) {
      case "~":
        return new StringValue(pythonString(left) + pythonString(right));
      case "==":
      case "!=":
        return new BooleanValue(equals(left, right) === (operator === "=="));
      default:
        return new BooleanValue(contains(right, left) === (operator === "in"));
    }
  }

  override evaluateMemberExpression(node: Node, environment: Environment): Value {
    if (node.property!.type === "SliceExpression") return super.evaluateMemberExpression(node, environment);
    const object = this.evaluate(node.object, environment);
    const property = node.computed ? this.evaluate(node.property, environment) : undefined;
    if (isString(object) && property instanceof IntegerValue) {
      const character = [...object.value].at(property.value as number);
      if (character !== undefined) return new StringValue(character);
    }
    if (!property) {
      const name = node.property!.value as string;
      const method = isString(object) ? stringMethod(object.value, name) : undefined;
      if (method) return method;
      // Of a dict, `.items` is the method, also where it has a key of that name.
      if (isObject(object) && object.type === "ObjectValue" && object.builtins.has(name))
        return object.builtins.get(name)!;
    }
    const rest = { ...node, object: known(object), ...(property && { property: known(property) }) };
    return super.evaluateMemberExpression(rest, environment);
  }

  override applyFilter(operand: Value, filter: Node, environment: Environment): Value {
    const name = (filter.callee ?? filter).value as string;
    const [args, named] = filter.args
      ? this.evaluateArguments(filter.args, environment)
      : [[], new Map<string, Value>()];
    switch (name) {
      case "trim": {
        const characters = args[0] ?? named.get("chars");
        return new StringValue(strip(pythonString(operand), characters && pythonString(characters)));
      }
      case "string":
        return new StringValue(pythonString(operand));
      case "capitalize":
        return new StringValue(capitalize(pythonString(operand)));
      case "title":
        return new StringValue(title(pythonString(operand)));
      case "length":
      case "count":
        if (isString(operand)) return new IntegerValue([...operand.value].length);
        return super.applyFilter(operand, { type: "Identifier", value: "length" }, environment);
      case "list":
        if (isString(operand)) return new ArrayValue([...operand.value].map((character) => new StringValue(character)));
        if (isObject(operand)) return new ArrayValue([...operand.value.keys()].map((key) => new StringValue(key)));
        break;
      case "join": {
        if (!isArray(operand) || named.has("attribute")) break;
        const separator = args[0] ?? named.get("d");
        return new StringValue(operand.value.map(pythonString).join(separator ? pythonString(separator) : ""));
      }
      case "default":
      case "d":
        if (operand.type === "UndefinedValue" && args.length === 0) return new StringValue("");
        if (!filter.args) return operand;
        return super.applyFilter(operand, { ...filter, callee: { type: "Identifier", value: "default" } }, environment);
      case "map":
        if (isArray(operand) && args[0] && args.length === 1 && named.size === 0) {
          const inner: Node = { type: "Identifier", value: pythonString(args[0]) };
          return new ArrayValue(operand.value.map((item) => this.applyFilter(item, inner, environment)));
        }
        break;
      case "selectattr":
      case "rejectattr":
        if (isArray(operand)) return selectByAttribute(operand.value, args, environment, name === "selectattr");
        break;
    }
    return super.applyFilter(operand, filter, environment);
  }
}

function controlOf(thrown: unknown): "break" | "continue" | undefined {
  if (thrown instanceof BreakControl) return "break";
  return thrown instanceof ContinueControl ? "continue" : undefined;
}

type Test = (value: Value, argument: Value) => boolean;

/** Tests that take an argument, which the library compares by identity or lacks. */
const TESTS: Record<string, Test> = {
  eq: equals,
  equalto: equals,
  "==": equals,
  ne: (value, argument) => !equals(value, argument),
  "!=": (value, argument) => !equals(value, argument),
  in: (value, argument) => contains(argument, value),
};

function selectByAttribute(items: Value[], args: Value[], environment: Environment, wanted: boolean): Value {
  const [attribute, name, argument] = args;
  if (!attribute) throw new Error("selectattr takes an attribute");
  const path = pythonString(attribute).split(".");
  const absent = environment.lookupVariable("\0") as Value; // nobody can give a variable this name: undefined
  const test = name && (TESTS[pythonString(name)] ?? (environment.tests.get(pythonString(name)) as Test | undefined));
  if (name && !test) throw new Error(`there is no test ${pythonString(name)}`);
  const passes = (item: Value): boolean => {
    const value = path.reduce<Value>((at, key) => (isObject(at) ? at.value.get(key) : undefined) ?? absent, item);
    if (test) return test(value, argument ?? absent);
    return (value as unknown as { __bool__(): Value }).__bool__().value as boolean;
  };
  return new ArrayValue(items.filter((item) => passes(item) === wanted));
}
