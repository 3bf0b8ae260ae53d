import { UserError } from "../base/errors.ts";
import { parseJson as parseText } from "../base/json.ts";
import { quote } from "../base/quote.ts";
import { HEADERS, malformed, optional, parseCount, readHeader, type Said } from "./headers.ts";
import { checkSampling, type Sampling } from "./sampling.ts";

export const WANTS = ["token", "logits", "all_logits", "hidden", "none"] as const;
/** What the tail shall give. */
export type Want = (typeof WANTS)[number];

export type { Sampling };

/** What is said for each row, as far as it was said. */
export interface RowFields {
  /** The row's real tokens: only a container says it, the other spellings show it. */
  readonly n?: number;
  readonly session?: string;
  readonly positionStart?: number;
  readonly maxLen?: number;
  /** Begin the session with `positionStart` tokens that nodes still hold of an earlier one: the digest of their ids. */
  readonly prefix?: string;
  readonly step?: number;
  readonly want?: Want;
  readonly sampling?: Sampling;
}

/** The headers of `batch` rows: one value for all, or a comma list of as many. Throws UserError `malformed`. */
export function rowFieldsOfHeaders(headers: Headers, batch: number): RowFields[] {
  const read = <T>(name: string, parse: (said: Said) => T) =>
    optional(readHeader(headers, name), (said) => listOf(said, batch, itemsOf(said, parse))) ?? [];
  const session = optional(readHeader(headers, HEADERS.session), parseSession);
  const starts = read(HEADERS.positionStart, parseCount);
  const maxLens = read(HEADERS.maxLen, parseCount);
  const steps = read(HEADERS.step, parseCount);
  const wants = read(HEADERS.want, parseWant);
  const samplings =
    optional(readHeader(headers, HEADERS.sampling), (said) => listOf(said, batch, samplingsOf(said))) ?? [];
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
        `a header says ${field} ${quote(value)}, and metadata rows[${row}] ${quote(merged[field])}`,
        "leave the header away: the metadata of a container says it all",
      );
    }
    return merged;
  });
}

const itemsOf = <T>({ where, text }: Said, parse: (said: Said) => T): T[] =>
  text.split(",").map((item) => parse({ where, text: item.trim() }));

/** `{…},{…}` is a JSON list without its brackets. */
function samplingsOf({ where, text }: Said): Sampling[] {
  const items = parseJson({ where, text: `[${text}]` }) as unknown[];
  return items.map((item) => checkSampling(item, where));
}

function listOf<T>(said: Said, batch: number, items: T[]): T[] {
  if (items.length === 1) return Array.from({ length: batch }, () => items[0]!);
  if (items.length === batch) return items;
  throw malformed(
    `${said.where} has ${items.length} values for ${batch} rows`,
    `give one value for all rows, or ${batch} with commas between them`,
  );
}

function parseRow(row: unknown, where: string): RowFields {
  if (typeof row !== "object" || row === null || Array.isArray(row))
    throw malformed(`${where} is not an object`, ROW_HINT);
  const { n, session, pos_start, max_len, prefix, step, want, sampling, ...unknown } = row as Record<string, unknown>;
  const stranger = Object.keys(unknown)[0];
  if (stranger !== undefined) throw malformed(`${where} has the unknown field ${quote(stranger)}`, ROW_HINT);
  const said = (field: string, value: unknown): Said | undefined =>
    value === undefined ? undefined : { where: `${where}.${field}`, text: textOf(value) };
  return {
    n: optional(said("n", n), parseCount),
    session: optional(said("session", session), parseRowSession),
    positionStart: optional(said("pos_start", pos_start), parseCount),
    maxLen: optional(said("max_len", max_len), parseCount),
    prefix: optional(said("prefix", prefix), parsePrefix),
    step: optional(said("step", step), parseCount),
    want: optional(said("want", want), parseWant),
    sampling: sampling === undefined ? undefined : parseSampling(sampling, `${where}.sampling`),
  };
}

const ROW_HINT = "the fields of a row are n, session, pos_start, max_len, prefix, step, want, sampling";

const textOf = (value: unknown): string => (typeof value === "string" ? value : JSON.stringify(value));

const parseSession = (said: Said): string => sessionId(said, /^[\w-]{1,64}$/);

/** In a container the rows of a batch are named one by one, as `id.0`, `id.1`, …. */
const parseRowSession = (said: Said): string => sessionId(said, /^[\w-]{1,64}(\.\d{1,9})?$/);

function sessionId({ where, text }: Said, pattern: RegExp): string {
  if (pattern.test(text)) return text;
  throw malformed(`${where} is ${quote(text)}`, "give 1 to 64 characters of A-Z a-z 0-9 _ -");
}

function parsePrefix({ where, text }: Said): string {
  if (/^[0-9a-f]{64}$/.test(text)) return text;
  throw malformed(`${where} is ${quote(text, 100)}`, "give 64 hex digits, as a digest of the ids has them");
}

function parseWant({ where, text }: Said): Want {
  const want = WANTS.find((known) => known === text);
  if (want !== undefined) return want;
  throw malformed(`${where} is ${quote(text)}`, `it can be ${WANTS.join(", ")}`);
}

/** An object, or one that is written as a text. */
const parseSampling = (value: unknown, where: string): Sampling =>
  checkSampling(typeof value === "string" ? parseJson({ where, text: value }) : value, where);

function parseJson({ where, text }: Said): unknown {
  try {
    return parseText(text);
  } catch (cause) {
    if (cause instanceof RangeError) throw cause; // `parseForward` says so
    throw malformed(`${where} is not JSON`, "check its quotes and commas", { cause });
  }
}

/**
 * Whether what is said of each row makes sense by itself, and what the rows want together: `token` also where some of
 * them want nothing. Throws UserError `malformed` or `not_supported` with the row.
 */
export function checkRowFields(rows: readonly RowFields[]): Want {
  rows.forEach(checkRow);
  const wants = new Set(rows.map(({ want = "token" }) => want));
  if (wants.size < 2) return rows[0]?.want ?? "token";
  if (wants.size === 2 && wants.has("token") && wants.has("none")) return "token";
  const [first, ...others] = wants;
  const row = rows.findIndex(({ want = "token" }) => want !== first);
  throw notSupported(
    row,
    `it wants ${rows[row]!.want ?? "token"}, and the first row ${first}${others.length > 1 ? ", others something else" : ""}`,
    "rows of one call want the same, or some of them token and the others none: send one call for each other wish",
  );
}

function checkRow({ session, step, positionStart, maxLen, prefix }: RowFields, row: number): void {
  const details = { details: { row } };
  if (session === undefined) {
    const used = Object.entries({ step, max_len: maxLen, prefix }).find(([, value]) => value !== undefined);
    const hint = "name a session, or send the whole sequence from position 0";
    if (used) throw notSupported(row, `${used[0]} is given without a session`, hint);
    if (positionStart) throw notSupported(row, `it starts at position ${positionStart} without a session`, hint);
    return;
  }
  if (step === undefined) {
    const hint = "give a number that grows with each call of the session: it makes a retry harmless";
    throw new UserError("malformed", `row ${row} has the session ${session} and no step`, hint, details);
  }
  if (prefix !== undefined && !positionStart) {
    const problem = `row ${row} begins with a prefix, and its pos_start is ${positionStart ?? "missing"}`;
    throw new UserError("malformed", problem, "give the number of tokens that the prefix stands for", details);
  }
}

function notSupported(row: number, problem: string, hint: string): UserError {
  return new UserError("not_supported", `row ${row}: ${problem}`, hint, { details: { row } });
}
