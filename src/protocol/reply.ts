import { bytesOf, sum } from "../base/bytes.ts";
import { quote } from "../base/quote.ts";
import { CONTAINER_TYPE, decodeContainer, encodeContainer } from "./container.ts";
import { type ErrorBody, parseErrorBody } from "./error-reply.ts";
import { HEADERS, malformed } from "./headers.ts";
import type { ForwardRequest } from "./message.ts";
import { halves, RAW_TYPE } from "./raw.ts";
import { encodeBase64, isPadded, maskOf, pad, type Rectangle } from "./rectangle.ts";
import type { Want } from "./rows.ts";

export type Finish = null | "stop";

/** Natural logarithms of probabilities, of the raw logits. */
export interface Logprobs {
  /** Of the token given. */
  readonly logprob: number;
  /** The likeliest tokens, the best first. */
  readonly top: readonly { readonly id: number; readonly logprob: number }[];
}

/** What came of a row that went well. */
export type RowResult =
  /** [n, hiddenSize] bfloat16 */
  | { readonly kind: "hidden"; readonly values: Uint16Array }
  | { readonly kind: "token"; readonly id: number; readonly finish: Finish; readonly logprobs?: Logprobs }
  /** [vocabSize] bfloat16, of the row's last token */
  | { readonly kind: "logits"; readonly values: Uint16Array }
  /** [n, vocabSize] bfloat16 */
  | { readonly kind: "all_logits"; readonly values: Uint16Array }
  | { readonly kind: "none" };

/** What came of a row. */
export type RowOutcome = RowResult | { readonly kind: "error"; readonly error: ErrorBody };

/** What a head adds to a token reply: the text that each row's token completes, and the ids it made of the prompts. */
export interface HeadText {
  /** One for each row; null where it has no token. */
  readonly text: readonly (string | null)[];
  readonly promptTokenIds?: readonly (readonly number[])[];
}

export interface Widths {
  readonly hiddenSize: number;
  readonly vocabSize: number;
}

/** A reply before it is a Response. */
export interface Reply {
  readonly status: number;
  readonly headers: Record<string, string>;
  readonly body: Uint8Array | string | null;
}

/** Whether the spelling of a request has a place for the errors of single rows beside the values of others. */
export const hasPlaceForErrors = ({ spelling }: ForwardRequest, kind: RowResult["kind"]): boolean =>
  spelling === "container" || kind === "token" || kind === "none";

/**
 * Lays what came of each row of a request out in its spelling. At least one row has gone well, and all that have are of
 * one kind, or tokens and nothing.
 */
export function encodeReply(
  request: ForwardRequest,
  outcomes: readonly RowOutcome[],
  widths: Widths,
  head?: HeadText,
): Reply {
  const kind = outcomes.find((outcome) => "values" in outcome)?.kind;
  if (kind === "hidden" || kind === "logits" || kind === "all_logits") {
    return encodeValues(request, kind, outcomes, widths);
  }
  const isNothing = outcomes.every((outcome) => outcome.kind === "none");
  return isNothing ? { status: 204, headers: {}, body: null } : encodeTokens(request, outcomes, head);
}

/** The bytes a reply of values will take, known before it is computed. 0 for tokens. */
export function replyBytes(request: ForwardRequest, kind: Want, widths: Widths): number {
  if (kind === "token" || kind === "none") return 0;
  const shape = rectangleOfReply(request, kind);
  const slots = shape ? shape.lengths.length * shape.slots : sum(request.rows.map(({ tokens }) => tokens));
  return slots * widthOf(kind, widths) * 2;
}

/** What a reply is read against: the rows that were sent. */
export interface Asked extends Widths {
  readonly rows: readonly { readonly tokens: number; readonly want: Want }[];
}

/**
 * Reads what the next node answered to a frame: an outcome for each of its rows. It may be what was wanted, or hidden
 * states where the chain ends before the tail. Throws UserError `malformed` for everything else.
 */
export function decodeReply(
  reply: { status: number; contentType: string; body: Uint8Array },
  asked: Asked,
): RowOutcome[] {
  const wants = new Set(asked.rows.map(({ want }) => want));
  const type = reply.contentType.split(";")[0]!.trim().toLowerCase();
  const isNothing = wants.size === 1 && wants.has("none");
  if (reply.status === 204 && isNothing) return asked.rows.map(() => ({ kind: "none" }));
  if (type === "application/json" && (isNothing || wants.has("token"))) return decodeTokens(reply.body, asked);
  if (type === CONTAINER_TYPE) return decodeValues(reply.body, asked);
  throw malformed(
    `it answered ${reply.status} with ${type || "no content-type"} to a call for ${[...wants].join(" and ")}`,
    "is it a meshnet node?",
  );
}

type ValueKind = "hidden" | "logits" | "all_logits";

const widthOf = (kind: ValueKind, { hiddenSize, vocabSize }: Widths): number =>
  kind === "hidden" ? hiddenSize : vocabSize;

const tensorName = (kind: ValueKind): string => (kind === "hidden" ? "hidden_states" : "logits");

/** How the values lie in the reply: [B, S] as in the call, or [B, 1] where each row has one; undefined: as rows. */
function rectangleOfReply({ rectangle, rows }: ForwardRequest, kind: ValueKind): Rectangle | undefined {
  if (kind !== "logits") return rectangle;
  const lengths = rectangle ? rectangle.lengths.map((length) => Math.min(length, 1)) : rows.map(() => 1);
  return { slots: 1, lengths };
}

/** Rows that failed lie in the reply like rows that took no part, and not at all in a reply of rows. */
function encodeValues(
  request: ForwardRequest,
  kind: ValueKind,
  outcomes: readonly RowOutcome[],
  widths: Widths,
): Reply {
  const width = widthOf(kind, widths);
  const values = join(outcomes.flatMap((outcome) => ("values" in outcome ? [outcome.values] : [])));
  const rectangle = withoutFailed(rectangleOfReply(request, kind), request, outcomes);
  const shape = rectangle ? [rectangle.lengths.length, rectangle.slots, width] : [values.length / width, width];
  const padded = rectangle ? pad(values, rectangle, width) : values;
  const isMasked = rectangle !== undefined && kind !== "logits" && isPadded(rectangle);

  if (request.spelling === "container") {
    const tensors = [{ name: tensorName(kind), dtype: "BF16", shape, data: padded } as const];
    const mask = isMasked
      ? [{ name: "attention_mask", dtype: "U8", shape: shape.slice(0, 2), data: maskOf(rectangle) } as const]
      : [];
    const errors = errorsOf(request, outcomes);
    const metadata = errors && { errors: JSON.stringify(errors) };
    const body = encodeContainer([...tensors, ...mask], metadata);
    return { status: 200, headers: { "Content-Type": CONTAINER_TYPE }, body };
  }
  const headers: Record<string, string> = { "Content-Type": RAW_TYPE, [HEADERS.shape]: shape.join(",") };
  // Whoever sent text has no mask yet, and needs one to pass the hidden states on by hand.
  if (request.spelling === "text" && isMasked) headers[HEADERS.attentionMask] = encodeBase64(maskOf(rectangle));
  return { status: 200, headers, body: bytesOf(padded) };
}

function withoutFailed(
  rectangle: Rectangle | undefined,
  { rows, rectangle: asked }: ForwardRequest,
  outcomes: readonly RowOutcome[],
): Rectangle | undefined {
  const failed = new Set(outcomes.flatMap(({ kind }, i) => (kind === "error" ? [rows[i]!.index] : [])));
  if (rectangle === undefined || failed.size === 0) return rectangle;
  const lengths = rectangle.lengths.map((length, row) => (failed.has(row) ? 0 : length));
  // [B, 1] of a call of rows: those that failed are left away, as they are from its other values.
  return { ...rectangle, lengths: asked ? lengths : lengths.filter((length) => length > 0) };
}

function encodeTokens(request: ForwardRequest, outcomes: readonly RowOutcome[], head?: HeadText): Reply {
  const tokens = outcomes.map((outcome) => (outcome.kind === "token" ? outcome : undefined));
  const logprobs = tokens.map((token) => token?.logprobs ?? null);
  const errors = errorsOf(request, outcomes);
  const body = {
    token_ids: perRow(request, (row) => tokens[row]?.id),
    finish: perRow(request, (row) => tokens[row]?.finish),
    ...(logprobs.some((given) => given !== null) && { logprobs: perRow(request, (row) => logprobs[row]) }),
    ...(errors && { errors }),
    ...(head && { text: perRow(request, (row) => head.text[row]) }),
    ...(head?.promptTokenIds && { prompt_token_ids: head.promptTokenIds }),
  };
  return { status: 200, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

/** One for each row of the call, those that took no part included; undefined where none failed. */
function errorsOf(request: ForwardRequest, outcomes: readonly RowOutcome[]): (ErrorBody | null)[] | undefined {
  if (outcomes.every(({ kind }) => kind !== "error")) return undefined;
  return perRow(request, (row) => {
    const outcome = outcomes[row]!;
    return outcome.kind === "error" ? outcome.error : null;
  });
}

/** `valueOf` is asked for each row that took part, by its place among those. */
function perRow<T>({ rows, rectangle }: ForwardRequest, valueOf: (row: number) => T | null | undefined): (T | null)[] {
  const all: (T | null)[] = Array.from({ length: rectangle?.lengths.length ?? rows.length }, () => null);
  rows.forEach(({ index }, row) => (all[index] = valueOf(row) ?? null));
  return all;
}

const NODE_HINT = "is it a meshnet node?";

function decodeTokens(body: Uint8Array, { rows, vocabSize }: Asked): RowOutcome[] {
  let reply: Record<string, unknown>;
  try {
    reply = JSON.parse(new TextDecoder().decode(body)) ?? {};
  } catch (cause) {
    throw malformed("its token reply is not JSON", NODE_HINT, { cause });
  }
  const { token_ids: ids, finish, logprobs } = reply;
  const errors = readErrors(reply["errors"], rows.length);
  const isGiven = (row: number): boolean => rows[row]!.want === "token" && !errors[row];
  const isId = (id: unknown, row: number) =>
    isGiven(row) ? Number.isInteger(id) && (id as number) >= 0 && (id as number) < vocabSize : id === null;
  if (!Array.isArray(ids) || ids.length !== rows.length || !ids.every(isId)) {
    throw malformed(
      `its token_ids are ${quote(ids)}, for ${rows.length} rows and a vocabulary of ${vocabSize}`,
      NODE_HINT,
    );
  }
  const isFinish = (end: unknown) => end === null || end === "stop";
  if (!Array.isArray(finish) || finish.length !== rows.length || !finish.every(isFinish)) {
    throw malformed(`its finish is ${quote(finish)}, for ${rows.length} rows`, NODE_HINT);
  }
  const hasLogprobs = (given: unknown) => given === null || isLogprobs(given);
  const isListed = Array.isArray(logprobs) && logprobs.length === rows.length && logprobs.every(hasLogprobs);
  if (logprobs !== undefined && !isListed) {
    throw malformed(`its logprobs are ${quote(logprobs)}, for ${rows.length} rows`, NODE_HINT);
  }
  return rows.map(({ want }, row): RowOutcome => {
    const error = errors[row];
    if (error) return { kind: "error", error };
    if (want === "none") return { kind: "none" };
    const given: Logprobs | null | undefined = isListed ? logprobs[row] : undefined;
    return { kind: "token", id: ids[row], finish: finish[row] as Finish, ...(given && { logprobs: given }) };
  });
}

function isLogprobs(value: unknown): boolean {
  const { logprob, top } = (value ?? {}) as { logprob?: unknown; top?: unknown };
  const isEntry = (entry: unknown) => {
    const { id, logprob: given } = (entry ?? {}) as { id?: unknown; logprob?: unknown };
    return Number.isInteger(id) && typeof given === "number";
  };
  return typeof logprob === "number" && Array.isArray(top) && top.every(isEntry);
}

function decodeValues(body: Uint8Array, { rows, ...widths }: Asked): RowOutcome[] {
  const { tensors, metadata } = decodeContainer(body);
  const errors = readErrors(parseErrors(metadata["errors"]), rows.length);
  const { want } = rows[0]!;
  const kind: ValueKind = tensors.has("logits") && (want === "logits" || want === "all_logits") ? want : "hidden";
  const name = tensorName(kind);
  const width = widthOf(kind, widths);
  // Each row that went well has so many vectors, one row after the other.
  const counts = rows.map(({ tokens }, row) => (errors[row] ? 0 : kind === "logits" ? 1 : tokens));
  const total = sum(counts);
  const wanted = kind === "logits" ? [total, 1, width] : [total, width];
  const tensor = tensors.get(name);
  if (tensor?.dtype !== "BF16" || String(tensor.shape) !== String(wanted)) {
    const found = tensor ? `${tensor.dtype} of shape [${tensor.shape}]` : "missing";
    throw malformed(
      `its ${name} is ${found}, and [${wanted}] in BF16 was asked for`,
      "is it the same version of meshnet?",
    );
  }
  const values = halves(tensor.data);
  let at = 0;
  return counts.map((count, row): RowOutcome => {
    const error = errors[row];
    return error ? { kind: "error", error } : { kind, values: values.subarray(at, (at += count * width)) };
  });
}

function parseErrors(text: string | undefined): unknown {
  if (text === undefined) return undefined;
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw malformed("its metadata errors is not JSON", NODE_HINT, { cause });
  }
}

/** The error of each row that failed. */
function readErrors(errors: unknown, rows: number): readonly (ErrorBody | undefined)[] {
  if (errors === undefined) return [];
  const read = Array.isArray(errors) ? errors.map(parseErrorBody) : [];
  const isSound = read.length === rows && read.every((error, row) => error || (errors as unknown[])[row] === null);
  if (isSound) return read;
  throw malformed(`its errors are ${quote(errors)}, for ${rows} rows`, NODE_HINT);
}

function join(values: readonly Uint16Array[]): Uint16Array {
  if (values.length === 1) return values[0]!;
  const joined = new Uint16Array(sum(values.map(({ length }) => length)));
  let at = 0;
  for (const part of values) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}
