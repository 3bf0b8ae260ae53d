import { UserError } from "../../base/errors.ts";
import { quote } from "../../base/quote.ts";

export type JsonObject = Readonly<Record<string, unknown>>;

/** An impossible parameter, by the name that error replies give as `param`. */
export const impossible = (param: string, problem: string, hint: string): UserError =>
  new UserError("malformed", `${param} ${problem}`, hint, { details: { param } });

/** A parameter of OpenAI's that this node has nothing for: said, because a caller who asks for it counts on it. */
export const lacking = (param: string, problem: string, hint: string): UserError =>
  new UserError("not_supported", `${param} ${problem}`, hint, { details: { param } });

/** The parameters of a call. `null` is as good as absent, as with OpenAI; whatever nobody asks for is ignored. */
export class Fields {
  readonly #body: JsonObject;

  constructor(body: JsonObject) {
    this.#body = body;
  }

  get(name: string): unknown {
    return this.#body[name] ?? undefined;
  }

  flag(name: string): boolean | undefined {
    return this.#typed(name, (value) => typeof value === "boolean", "true or false");
  }

  object(name: string): JsonObject | undefined {
    return this.#typed(name, isObject, "an object");
  }

  /** From `least` to `most`. */
  number(name: string, least: number, most: number): number | undefined {
    const ok = (value: unknown) => typeof value === "number" && value >= least && value <= most;
    return this.#typed(name, ok, `a number from ${least} to ${most}`);
  }

  /** A whole number from `least` to `most`. */
  count(name: string, least: number, most = Number.MAX_SAFE_INTEGER): number | undefined {
    const ok = (value: unknown) =>
      Number.isSafeInteger(value) && (value as number) >= least && (value as number) <= most;
    const upTo = most === Number.MAX_SAFE_INTEGER ? "2^53 - 1" : most;
    return this.#typed(name, ok, `a whole number from ${least} to ${upTo}`);
  }

  #typed<T>(name: string, ok: (value: unknown) => boolean, allowed: string): T | undefined {
    const value = this.get(name);
    if (value === undefined || ok(value)) return value as T | undefined;
    throw impossible(name, `is ${quote(value)}, and it can be ${allowed}`, `give ${allowed}, or leave it away`);
  }
}

export const isObject = (value: unknown): value is JsonObject =>
  typeof value === "object" && value !== null && !Array.isArray(value);
