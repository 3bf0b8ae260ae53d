import { type ArgsDef, parseArgs } from "citty";
import { UserError } from "../base/errors.ts";

/**
 * citty takes what it does not know: unknown flags, extra words, a flag without its value. Here each is an error, which
 * names the nearest flag. Flags that are not given come from the environment: `--max-context` from MESHNET_MAX_CONTEXT.
 */
export function strictArgs<T extends ArgsDef>(
  command: string,
  args: T,
  rawArgs: readonly string[],
  env: Readonly<Record<string, string | undefined>>,
): ReturnType<typeof parseArgs<T>> {
  checkWords(command, args, rawArgs);
  const fromEnvironment = Object.values(flagsOfEnvironment(args, rawArgs, env));
  try {
    return parseArgs<T>([...fromEnvironment, ...rawArgs], args);
  } catch (error) {
    throw new UserError("bad_usage", Bun.stripANSI((error as Error).message), seeHelp(command));
  }
}

/** Flags that are not among the words, by their names, as the environment gives them. */
export function flagsOfEnvironment(
  args: ArgsDef,
  words: readonly string[],
  env: Readonly<Record<string, string | undefined>>,
): Readonly<Record<string, string>> {
  const flags: Record<string, string> = {};
  for (const [name, { type }] of Object.entries(args)) {
    const value = env[environmentName(name)];
    if (value === undefined || value === "" || type === "positional" || isGiven(name, words)) continue;
    if (type !== "boolean") flags[name] = `--${name}=${value}`;
    else if (/^(1|true|yes|on)$/i.test(value)) flags[name] = `--${name}`;
    else if (/^(0|false|no|off)$/i.test(value)) flags[name] = `--no-${name}`;
  }
  return flags;
}

export const environmentName = (flag: string): string => `MESHNET_${flag.toUpperCase().replaceAll("-", "_")}`;

export const seeHelp = (command: string): string => `see meshnet ${command} --help`;

/** `--port 80` and `--port=80`, also `--no-x` for a boolean. */
function checkWords(command: string, args: ArgsDef, words: readonly string[]): void {
  const names = Object.keys(args).filter((name) => args[name]!.type !== "positional");
  const given = new Set<string>();
  let positionals = Object.values(args).filter(({ type }) => type === "positional").length;
  for (let i = 0; i < words.length; i++) {
    const word = words[i]!;
    if (word === "--") return checkPositionals(words.slice(i + 1));
    if (!word.startsWith("-") || word === "-") {
      if (positionals-- > 0) continue;
      throw new UserError("bad_usage", `unexpected word "${word}"`, seeHelp(command));
    }
    const [flag = "", value] = splitFlag(word);
    const known = names.find((name) => flag === `--${name}` || aliasesOf(args[name]!).includes(flag));
    const negated = names.find((name) => args[name]!.type === "boolean" && flag === `--no-${name}`);
    if (!known && !negated) throw unknownFlag(command, flag, names);
    const name = (known ?? negated)!;
    if (given.has(name)) throw new UserError("bad_usage", `--${name} is given twice`, "give it once");
    given.add(name);
    if (negated || args[known!]!.type === "boolean") continue;
    if (value === undefined) i++;
    const text = value ?? words[i];
    if (text === undefined || text === "" || (value === undefined && text.startsWith("--"))) {
      throw new UserError("bad_usage", `${flag} needs a value`, seeHelp(command));
    }
  }

  function checkPositionals(rest: readonly string[]): void {
    if (rest.length > positionals)
      throw new UserError("bad_usage", `unexpected word "${rest[positionals]}"`, seeHelp(command));
  }
}

/** The words with a flag that may be given several times in them once, and all its values. */
export function onceEach(
  flag: string | undefined,
  words: readonly string[],
): { readonly once: readonly string[]; readonly values: readonly string[] } {
  const values: string[] = [];
  const others: string[] = [];
  const end = words.indexOf("--");
  for (let i = 0; i < words.length; i++) {
    const [name, value] = splitFlag(words[i]!);
    if (flag === undefined || name !== `--${flag}` || (end >= 0 && i > end)) others.push(words[i]!);
    else if (value !== undefined) values.push(value);
    else values.push(words[i + 1]?.startsWith("--") ? "" : (words[++i] ?? ""));
  }
  const shown = values.includes("") ? "" : values[0]; // one without a value is found to be wrong
  return { once: shown === undefined ? others : [`--${flag}=${shown}`, ...others], values };
}

function splitFlag(word: string): [flag: string, value?: string] {
  const at = word.indexOf("=");
  return at < 0 ? [word] : [word.slice(0, at), word.slice(at + 1)];
}

const aliasesOf = (arg: ArgsDef[string]): string[] =>
  "alias" in arg && arg.alias ? [arg.alias].flat().map((alias) => `${alias.length > 1 ? "--" : "-"}${alias}`) : [];

const isGiven = (name: string, words: readonly string[]): boolean =>
  words.some((word) => word === `--${name}` || word.startsWith(`--${name}=`) || word === `--no-${name}`);

function unknownFlag(command: string, flag: string, names: readonly string[]): UserError {
  const nearest = nearestName(flag.replace(/^-+/, ""), names);
  return new UserError(
    "bad_usage",
    `unknown flag ${flag}`,
    nearest ? `did you mean --${nearest}? ${seeHelp(command)}` : seeHelp(command),
  );
}

/** The most similar name, if one is similar at all: at most a third of its letters differ. */
export function nearestName(word: string, names: readonly string[]): string | undefined {
  const [best] = names
    .map((name) => ({ name, distance: editDistance(word, name) }))
    .filter(({ name, distance }) => distance <= Math.max(2, name.length / 3))
    .sort((a, b) => a.distance - b.distance);
  return best?.name;
}

/** Levenshtein's: insertions, deletions and replacements. */
function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      next.push(Math.min(row[j]! + 1, next[j - 1]! + 1, row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1)));
    }
    row = next;
  }
  return row[b.length]!;
}
