import { readFileSync } from "node:fs";
import type { ArgsDef, ParsedArgs } from "citty";
import { messageOf, UserError } from "../base/errors.ts";
import type { TextOptions } from "../mesh/head-client.ts";
import type { NodeInfo } from "../protocol/info.ts";
import { checkSamplingField, type Sampling } from "../protocol/sampling.ts";
import { wholeNumber } from "./flags.ts";

/** How a text is made: what `generate` and `chat` have in common. */
export const textFlags = {
  "max-new-tokens": { type: "string", valueHint: "N", description: "The most tokens to make" },
  temperature: {
    type: "string",
    valueHint: "X",
    description: "Draw tokens, the bolder the higher: 0 to 2; 0 takes the likeliest",
  },
  "top-k": { type: "string", valueHint: "K", description: "Draw among the K likeliest tokens only; 0: all" },
  "top-p": { type: "string", valueHint: "P", description: "Draw among the likeliest that make up this probability" },
  "min-p": {
    type: "string",
    valueHint: "P",
    description: "Draw among tokens with at least this part of the best one's probability",
  },
  "repetition-penalty": {
    type: "string",
    valueHint: "X",
    description: "Above 1: tokens that are in the text already become less likely",
  },
  seed: { type: "string", valueHint: "N", description: "Draw, and with the same seed the same text again" },
  stop: {
    type: "string",
    valueHint: "TEXT",
    description: "End before this text; may be given up to four times",
  },
  json: { type: "boolean", default: false, description: "Print JSON at the end instead of text as it comes" },
  quiet: { type: "boolean", default: false, description: "Nothing on stderr but problems" },
} satisfies ArgsDef;

/** OpenAI's own limits, which heads have too. */
const MOST_TEMPERATURE = 2;
const MOST_STOPS = 4;

/** Throws UserError `bad_usage` or `malformed` before anything is loaded or asked. */
export function textOptions(
  args: Pick<ParsedArgs<typeof textFlags>, "max-new-tokens" | "temperature" | "seed" | (typeof FILTERS)[number][0]>,
  stops: readonly string[],
): TextOptions {
  const options = Object.fromEntries(
    FILTERS.map(([flag, field]) => [field, sampled(flag, field, args[flag])]).filter(
      ([, value]) => value !== undefined,
    ),
  );
  const temperature = sampled("temperature", "temperature", args.temperature);
  if (temperature !== undefined && temperature > MOST_TEMPERATURE) {
    const hint = `give a number from 0 to ${MOST_TEMPERATURE}`;
    throw new UserError("bad_usage", `--temperature ${temperature} is more than ${MOST_TEMPERATURE}`, hint);
  }
  const seed = sampled("seed", "seed", args.seed);
  if (stops.length > MOST_STOPS) {
    throw new UserError("bad_usage", `--stop is given ${stops.length} times`, `${MOST_STOPS} are the most`);
  }
  return {
    max_tokens: wholeNumber("max-new-tokens", args["max-new-tokens"], 1),
    ...options,
    ...(temperature !== undefined && { temperature }),
    ...(seed !== undefined && { seed }),
    ...(stops.length > 0 && { stop: stops }),
  };
}

const FILTERS = [
  ["top-k", "top_k"],
  ["top-p", "top_p"],
  ["min-p", "min_p"],
  ["repetition-penalty", "repetition_penalty"],
] as const;

function sampled(flag: string, field: keyof Sampling, text: string | undefined): number | undefined {
  if (text === undefined) return undefined;
  const value = /^-?(\d+\.?\d*|\.\d+)(e-?\d+)?$/i.test(text) ? Number(text) : Number.NaN;
  if (Number.isNaN(value)) throw new UserError("bad_usage", `--${flag} ${text} is not a number`, `give one`);
  checkSamplingField(field, value, `--${flag} is`);
  return value;
}

/**
 * Greedy, unless a flag or the model asks for drawing. Left to itself the API draws from all tokens, as OpenAI's does.
 */
export function greedyUnlessAsked(options: TextOptions, info: NodeInfo | undefined): TextOptions {
  const { temperature, top_k, top_p, min_p, seed } = options;
  const isAsked = [temperature, top_k, top_p, min_p, seed].some((field) => field !== undefined);
  return isAsked || info?.texts?.do_sample ? options : { ...options, temperature: 0 };
}

/**
 * The text of a file, or of stdin (`-`), without the line break at its end that editors and `echo` put there.
 * Throws UserError: `not_found` where there is none to be read, `bad_usage` where it is no text.
 */
export async function readText(path: string, flag: string): Promise<string> {
  const where = path === "-" ? "stdin" : `${flag} ${path}`;
  let bytes: Uint8Array;
  try {
    bytes = path === "-" ? await Bun.stdin.bytes() : readFileSync(path);
  } catch (cause) {
    throw new UserError("not_found", `${where} cannot be read: ${fileProblem(cause)}`, "give a file of text", {
      cause,
    });
  }
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes).replace(/\r?\n$/, "");
  } catch (cause) {
    throw new UserError("bad_usage", `${where} is not text in UTF-8`, "convert it first", { cause });
  }
}

/** Without the path, which the message around it names. */
function fileProblem(cause: unknown): string {
  const code = String((cause as { code?: unknown } | null)?.code);
  return FILE_PROBLEMS[code] ?? messageOf(cause);
}

const FILE_PROBLEMS: Readonly<Record<string, string>> = {
  ENOENT: "there is no such file",
  EACCES: "this user may not read it",
  EISDIR: "it is a directory",
};
