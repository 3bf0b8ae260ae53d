import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import { createLogger, type Logger, type LogLevel } from "../base/log.ts";

/** Flags arrive as text; here they become what they mean. */

export function wholeNumber(
  flag: string,
  text: string | undefined,
  least: number,
  most = Number.MAX_SAFE_INTEGER,
): number | undefined {
  if (text === undefined) return undefined;
  const value = /^\d+$/.test(text) ? Number(text) : Number.NaN;
  if (value >= least && value <= most) return value;
  const range = most === Number.MAX_SAFE_INTEGER ? `of at least ${least}` : `from ${least} to ${most}`;
  throw new UserError(
    "bad_usage",
    `--${flag} ${text} is not a whole number ${range}`,
    `give one, as --${flag} ${least}`,
  );
}

export const wordList = (text: string | undefined): string[] =>
  (text ?? "")
    .split(",")
    .map((word) => word.trim())
    .filter(Boolean);

/** Where a model comes from, besides `--model-id`. */
export const hubFlags = {
  revision: { type: "string", valueHint: "R", description: "A branch, tag or commit on the Hub (default: main)" },
  "cache-dir": {
    type: "string",
    valueHint: "DIR",
    description: "Where models are kept (default: Hugging Face's cache)",
  },
  offline: { type: "boolean", default: false, description: "Use only what is on this machine already" },
} satisfies ArgsDef;

export const logFlags = {
  "log-level": {
    type: "enum",
    options: ["debug", "info", "warn", "error"],
    default: "info",
    description: "The least important lines that are logged",
  },
  "log-format": {
    type: "enum",
    options: ["text", "json"],
    default: "text",
    description: "Log lines for people or for machines",
  },
} satisfies ArgsDef;

/** Logs go to stderr: stdout is for results. */
export const loggerOf = (
  args: { "log-level": string; "log-format": string },
  write: (line: string) => void = (line) => process.stderr.write(`${line}\n`),
): Logger =>
  createLogger({
    level: args["log-level"] as LogLevel,
    format: args["log-format"] as "text" | "json",
    write,
  });
