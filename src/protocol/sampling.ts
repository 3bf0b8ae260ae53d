import { quote } from "../base/quote.ts";
import { malformed } from "./headers.ts";

/**
 * How the tail draws a token, in the words of the wire (`X-Meshnet-Sampling`, `rows[].sampling`). What is absent is off;
 * the hidden defaults of transformers (top_k 50) are the sender's affair (`models/generation-config.ts`).
 */
export interface Sampling {
  /** Scores are divided by it. 0: the likeliest token. */
  readonly temperature?: number;
  /** Only the k largest scores, and what equals the last of them. 0: all. */
  readonly top_k?: number;
  /** Only the likeliest tokens that make up this probability. */
  readonly top_p?: number;
  /** Only tokens with at least this part of the best one's probability. */
  readonly min_p?: number;
  /** Scores of tokens that the sequence has already are divided by it, negative ones multiplied. */
  readonly repetition_penalty?: number;
  /** With the position it decides the draw. A whole number that a float64 holds exactly. */
  readonly seed?: number;
  /** Report the token's logprob, and those of so many likeliest tokens. */
  readonly logprobs?: number;
  readonly stop_token_ids?: readonly number[];
}

/** What OpenAI takes for `top_logprobs`, and more than anybody looks at: a reply stays small. */
export const MOST_LOGPROBS = 20;

/** More ids that stop are no list of end-of-text tokens any more. */
export const MOST_STOP_TOKEN_IDS = 1024;

/**
 * Checks a parsed JSON value. `where` names it in messages ("header X-Meshnet-Sampling"). Throws UserError `malformed`
 * that says the field, its value and what it can be.
 */
export function checkSampling(value: unknown, where: string): Sampling {
  const known = `its fields are ${Object.keys(FIELDS).join(", ")}`;
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw malformed(`${where} is not a JSON object`, known);
  }
  for (const [field, given] of Object.entries(value)) {
    if (!Object.hasOwn(FIELDS, field)) throw malformed(`${where} has the unknown field ${quote(field)}`, known);
    checkSamplingField(field as keyof Sampling, given, `${where} has ${field}`);
  }
  return value as Sampling;
}

/** As `checkSampling`, for one value. `what` stands before it: "temperature is". */
export function checkSamplingField(field: keyof Sampling, value: unknown, what: string): void {
  const { ok, allowed } = FIELDS[field];
  if (!ok(value)) throw malformed(`${what} ${quote(value)}, and ${field} is ${allowed}`, `give ${allowed}`);
}

/** Whether a token is drawn; else it is the one with the largest score. */
export function isDrawn({ temperature, top_k, top_p, min_p, seed }: Sampling): boolean {
  if (temperature !== undefined) return temperature > 0;
  return [top_k, top_p, min_p, seed].some((field) => field !== undefined);
}

const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);
const isCount = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;

const FIELDS: Record<keyof Sampling, { ok: (value: unknown) => boolean; allowed: string }> = {
  temperature: { ok: (value) => isNumber(value) && value >= 0, allowed: "a number from 0" },
  top_k: { ok: isCount, allowed: "a whole number from 0 to 2^53 - 1" },
  top_p: { ok: (value) => isNumber(value) && value > 0 && value <= 1, allowed: "a number above 0, up to 1" },
  min_p: { ok: (value) => isNumber(value) && value >= 0 && value <= 1, allowed: "a number from 0 to 1" },
  repetition_penalty: { ok: (value) => isNumber(value) && value > 0, allowed: "a number above 0" },
  seed: { ok: Number.isSafeInteger, allowed: `a whole number from -(2^53 - 1) to 2^53 - 1` },
  logprobs: {
    ok: (value) => isCount(value) && value <= MOST_LOGPROBS,
    allowed: `a whole number from 0 to ${MOST_LOGPROBS}`,
  },
  stop_token_ids: {
    ok: (value) => Array.isArray(value) && value.length <= MOST_STOP_TOKEN_IDS && value.every(isCount),
    allowed: `a list of at most ${MOST_STOP_TOKEN_IDS} token ids`,
  },
};
