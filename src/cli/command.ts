import { type ArgsDef, type CommandDef, type ParsedArgs, renderUsage } from "citty";
import { UserError } from "../base/errors.ts";
import { environmentName, flagsOfEnvironment, onceEach, strictArgs } from "./strict.ts";

/** A command as plain data: its flags, an example, and what it does with them. */
export interface Command {
  readonly name: string;
  readonly description: string;
  help(): Promise<string>;
  run(words: readonly string[]): Promise<number>;
}

export function defineCommand<T extends ArgsDef>(spec: {
  name: string;
  description: string;
  args: T;
  examples: readonly string[];
  /** A flag that may be given several times. */
  list?: string;
  /** Gives the exit code. `list`: all values of that flag. */
  run: (args: ParsedArgs<T>, list: readonly string[]) => Promise<number>;
}): Command {
  const { name, description, args, examples, list } = spec;
  return {
    name,
    description,
    async help() {
      const usage = await renderUsage({ meta: { name, description }, args } as CommandDef, {
        meta: { name: "meshnet" },
      });
      const flags = Object.keys(args).filter((flag) => args[flag]!.type !== "positional");
      return [
        usage.replace(/ +$/gm, "").trimEnd(),
        "",
        "EXAMPLES",
        "",
        ...examples.map((example) => `  ${example}`),
        "",
        `Flags can also be given by the environment, as ${environmentName(flags[0]!)} for --${flags[0]}.`,
      ].join("\n");
    },
    run: async (words) => {
      const { once, values } = onceEach(list, words);
      const unseen = Object.keys(flagsOfEnvironment(args, once, process.env));
      try {
        const parsed = strictArgs(name, args, once, process.env) as ParsedArgs<T>;
        const [only] = list === undefined ? [] : [(parsed as Record<string, unknown>)[list]];
        return await spec.run(parsed, values.length > 1 ? values : typeof only === "string" ? [only] : []);
      } catch (error) {
        throw withOrigin(error, unseen);
      }
    },
  };
}

/** An error about a flag that nobody typed says where its value is from. */
function withOrigin(error: unknown, unseen: readonly string[]): unknown {
  if (!(error instanceof UserError)) return error;
  const blamed = unseen.filter((flag) => new RegExp(`(^|[^\\w-])--${flag}(?![\\w-])`).test(error.message));
  if (blamed.length === 0) return error;
  const origins = blamed.map((flag) => `--${flag} comes from the environment's ${environmentName(flag)}`);
  const { code, message, hint, cause, details } = error;
  return new UserError(code, message, `${hint}; ${origins.join(", ")}`, { cause, details });
}
