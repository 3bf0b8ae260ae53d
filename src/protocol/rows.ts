import { UserError } from "../base/errors.ts";
import { HEADERS, malformed, optional, parseCount, readHeader, type Said } from "./headers.ts";

export const WANTS = ["token", "logits", "all_logits", "hidden", "none"] as const;
/** What the tail shall give. */
export type Want = (typeof WANTS)[number];

export interface Sampling {
  readonly temperature?: number;
  readonly top_k?: number;
  readonly top_p?: number;
  readonly min_p?: number;
  readonly repetition_penalty?: number;
  readonly seed?: number;
  readonly logprobs?: number;
  readonly stop_token_ids?: readonly number[];
}

/** What is said for each row, as far as it was said. */
export interface RowFields {
  /** The row's real tokens: only a container says it, the other spellings show it. */
  readonly n?: number;
  readonly session?: string;
  readonly positionStart?: number;
  readonly maxLen?: number;
  readonly step?: number;
  readonly want?: Want;
  readonly sampling?: Sampling;
}

/** The headers of `batch` rows: one value for all, or a comma list of as many. Throws UserError `malformed`. */
export function rowFieldsOfHeaders(headers: Headers, batch: number): RowFields[] {
  const read = <T>(name: string, parse: (said: Said) => T, split = (text: string) => text.split(",")) =>
    optional(readHeader(headers, name), (said) => listOf(said, batch, parse, split)) ?? [];
  const session = optional(readHeader(headers, HEADERS.session), parseSession);
  const starts = read(HEADERS.positionStart, parseCount);
  const maxLens = read(HEADERS.maxLen, parseCount);
  const steps = read(HEADERS.step, parseCount);
  const wants = read(HEADERS.want, parseWant);
  const samplings = read(HEADERS.sampling, parseSampling, splitJson);
  return Array.from({ length: batch }, (_, row) => ({
    session: session !== undefined && batch > 1 ? `${session}.${row}` : session,
    positionStart: starts[row],
    maxLen: maxLens[row],
    step: steps[row],
    want: wants[row],
    sampling: samplings[row],
  }));
}

/** The metadata `rows` of a container: a JSON list of objects. Throws UserError `malformed`. */
export function rowFieldsOfMetadata(text: string): RowFields[] {
  const rows = parseJson({ where: "metadata rows", text });
  if (!Array.isArray(rows)) throw malformed("metadata rows is not a JSON list", 'write it as [{"n": tokens, …}, …]');
  return rows.map((row: unknown, index) => parseRow(row, `metadata rows[${index}]`));
}

/** What two places say of the same rows. Throws UserError `malformed` where they differ. */
export function mergeRowFields(metadata: readonly RowFields[], headers: readonly RowFields[]): RowFields[] {
  return metadata.map((inside, row) => {
    const merged: Record<string, unknown> = { ...inside };
    for (const [field, value] of Object.entries(headers[row] ?? {})) {
      if (value === undefined) continue;
      merged[field] ??= value;
      if (JSON.stringify(merged[field]) === JSON.stringify(value)) continue;
      throw malformed(
        `a header says ${field} ${JSON.stringify(value)}, and metadata rows[${row}] ${JSON.stringify(merged[field])}`,
        "leave the header away: the metadata of a container says it all",
      );
    }
    return merged;
  });
}

/** Whether the tail takes the likeliest token, as it does where nothing is said. */
export function isGreedy(sampling: Sampling | undefined): boolean {
  const { temperature, repetition_penalty, logprobs, stop_token_ids, ...shape } = sampling ?? {};
  const sharp = temperature === 0 || (temperature === undefined && Object.keys(shape).length === 0);
  return sharp && (repetition_penalty ?? 1) === 1 && !logprobs && !stop_token_ids?.length;
}

function listOf<T>(said: Said, batch: number, parse: (said: Said) => T, split: (text: string) => string[]): T[] {
  const items = split(said.text).map((text) => parse({ where: said.where, text: text.trim() }));
  if (items.length === 1) return Array.from({ length: batch }, () => items[0]!);
  if (items.length === batch) return items;
  throw malformed(
    `${said.where} has ${items.length} values for ${batch} rows`,
    `give one value for all rows, or ${batch} with commas between them`,
  );
}

/** `{…},{…}` is a JSON list without its brackets. */
function splitJson(text: string): string[] {
  const items = parseJson({ where: `header ${HEADERS.sampling}`, text: `[${text}]` }) as unknown[];
  return items.map((item) => JSON.stringify(item));
}

function parseRow(row: unknown, where: string): RowFields {
  if (typeof row !== "object" || row === null || Array.isArray(row))
    throw malformed(`${where} is not an object`, ROW_HINT);
  const { n, session, pos_start, max_len, step, want, sampling, ...unknown } = row as Record<string, unknown>;
  const stranger = Object.keys(unknown)[0];
  if (stranger !== undefined) throw malformed(`${where} has the unknown field "${stranger}"`, ROW_HINT);
  const said = (field: string, value: unknown): Said | undefined =>
    value === undefined ? undefined : { where: `${where}.${field}`, text: textOf(value) };
  return {
    n: optional(said("n", n), parseCount),
    session: optional(said("session", session), parseRowSession),
    positionStart: optional(said("pos_start", pos_start), parseCount),
    maxLen: optional(said("max_len", max_len), parseCount),
    step: optional(said("step", step), parseCount),
    want: optional(said("want", want), parseWant),
    sampling: optional(said("sampling", sampling), parseSampling),
  };
}

const ROW_HINT = "the fields of a row are n, session, pos_start, max_len, step, want, sampling";

const textOf = (value: unknown): string => (typeof value === "string" ? value : JSON.stringify(value));

const parseSession = (said: Said): string => sessionId(said, /^[\w-]{1,64}$/);

/** In a container the rows of a batch are named one by one, as `id.0`, `id.1`, …. */
const parseRowSession = (said: Said): string => sessionId(said, /^[\w-]{1,64}(\.\d{1,9})?$/);

function sessionId({ where, text }: Said, pattern: RegExp): string {
  if (pattern.test(text)) return text;
  throw malformed(`${where} is "${text}"`, "give 1 to 64 characters of A-Z a-z 0-9 _ -");
}

function parseWant({ where, text }: Said): Want {
  const want = WANTS.find((known) => known === text);
  if (want !== undefined) return want;
  throw malformed(`${where} is "${text}"`, `it can be ${WANTS.join(", ")}`);
}

const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);
const isCount = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;

/** Each field, when its value is well-formed, and what to say where it is not. */
const SAMPLING_FIELDS: Record<keyof Sampling, { ok: (value: unknown) => boolean; hint: string }> = {
  temperature: { ok: (value) => isNumber(value) && value >= 0, hint: "a number from 0" },
  top_k: { ok: isCount, hint: "a whole number from 0" },
  top_p: { ok: (value) => isNumber(value) && value > 0 && value <= 1, hint: "a number above 0, up to 1" },
  min_p: { ok: (value) => isNumber(value) && value >= 0 && value <= 1, hint: "a number from 0 to 1" },
  repetition_penalty: { ok: (value) => isNumber(value) && value > 0, hint: "a number above 0" },
  seed: { ok: isCount, hint: "a whole number from 0" },
  logprobs: { ok: isCount, hint: "a whole number from 0" },
  stop_token_ids: { ok: (value) => Array.isArray(value) && value.every(isCount), hint: "a list of token ids" },
};

function parseSampling(said: Said): Sampling {
  const value = parseJson(said);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw malformed(`${said.where} is not a JSON object`, `its fields are ${Object.keys(SAMPLING_FIELDS).join(", ")}`);
  }
  for (const [field, given] of Object.entries(value)) {
    if (!Object.hasOwn(SAMPLING_FIELDS, field)) {
      throw malformed(
        `${said.where} has the unknown field "${field}"`,
        `known: ${Object.keys(SAMPLING_FIELDS).join(", ")}`,
      );
    }
    const { ok, hint } = SAMPLING_FIELDS[field as keyof Sampling];
    if (!ok(given)) throw malformed(`${said.where} has ${field} ${JSON.stringify(given)}`, `give ${hint}`);
  }
  return value;
}

function parseJson({ where, text }: Said): unknown {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw malformed(`${where} is not JSON`, "check its quotes and commas", { cause });
  }
}

/**
 * What the contract has and this version has not: sessions, sampling, and rows that want different things. Refused
 * rather than ignored. Returns what all rows want.
 */
export function onlyStateless(rows: readonly RowFields[]): Want {
  const want = rows[0]?.want ?? "token";
  for (const [row, fields] of rows.entries()) {
    const session = { session: fields.session, step: fields.step, max_len: fields.maxLen };
    const used = Object.entries(session).find(([, value]) => value !== undefined);
    if (used) throw notSupported(row, `${used[0]} is given`, "leave it away and send the whole sequence");
    if (fields.positionStart) {
      const problem = `it starts at position ${fields.positionStart}, and this node keeps no sessions`;
      throw notSupported(row, problem, "send the whole sequence, from position 0");
    }
    if (!isGreedy(fields.sampling))
      throw notSupported(row, "sampling is asked for", "only greedy decoding is here: leave it away");
    if ((fields.want ?? "token") !== want) {
      throw notSupported(
        row,
        `it wants ${fields.want ?? "token"}, and the first row ${want}`,
        "send one call for each",
      );
    }
  }
  return want;
}

function notSupported(row: number, problem: string, hint: string): UserError {
  return new UserError("not_supported", `row ${row}: ${problem}`, hint, { details: { row } });
}
