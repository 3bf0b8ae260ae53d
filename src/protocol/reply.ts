import { bytesOf, sum } from "../base/bytes.ts";
import { CONTAINER_TYPE, decodeContainer, encodeContainer } from "./container.ts";
import { HEADERS, malformed } from "./headers.ts";
import type { ForwardRequest, ForwardRow } from "./message.ts";
import { halves, RAW_TYPE } from "./raw.ts";
import { encodeBase64, isPadded, maskOf, pad, type Rectangle } from "./rectangle.ts";
import type { Want } from "./rows.ts";

export type Finish = null | "stop";

/** What came of a call: of its T tokens or of its rows, padding unknown. */
export type ForwardResult =
  /** [T, hiddenSize] bfloat16 */
  | { readonly kind: "hidden"; readonly values: Uint16Array }
  /** One of each for every row. */
  | { readonly kind: "token"; readonly ids: readonly number[]; readonly finish: readonly Finish[] }
  /** [rows, vocabSize] bfloat16, of the last token of each row */
  | { readonly kind: "logits"; readonly values: Uint16Array }
  /** [T, vocabSize] bfloat16 */
  | { readonly kind: "all_logits"; readonly values: Uint16Array }
  | { readonly kind: "none" };

/** What a head adds to a token reply: the text that each row's token completes, and the ids it made of the prompts. */
export interface HeadText {
  readonly text: readonly string[];
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

/** Lays a result out in the spelling of its request. */
export function encodeReply(request: ForwardRequest, result: ForwardResult, widths: Widths, head?: HeadText): Reply {
  switch (result.kind) {
    case "none":
      return { status: 204, headers: {}, body: null };
    case "token":
      return encodeTokens(request, result, head);
    case "hidden":
    case "logits":
    case "all_logits":
      return encodeValues(request, result.kind, result.values, widths);
  }
}

/** The bytes a reply of values will take, known before it is computed. 0 for tokens. */
export function replyBytes(request: ForwardRequest, kind: Want, widths: Widths): number {
  if (kind === "token" || kind === "none") return 0;
  const shape = rectangleOfReply(request, kind);
  const slots = shape ? shape.lengths.length * shape.slots : sum(request.rows.map(({ tokens }) => tokens));
  return slots * widthOf(kind, widths) * 2;
}

/**
 * Reads what the next node answered to a frame of `rows`. It may be what was wanted, or hidden states where the chain
 * ends before the tail. Throws UserError `malformed` for everything else.
 */
export function decodeReply(
  reply: { status: number; contentType: string; body: Uint8Array },
  asked: { rows: readonly ForwardRow[]; want: Want } & Widths,
): ForwardResult {
  if (reply.status === 204 && asked.want === "none") return { kind: "none" };
  const type = reply.contentType.split(";")[0]!.trim().toLowerCase();
  if (type === "application/json" && asked.want === "token") return decodeTokens(reply.body, asked);
  if (type === CONTAINER_TYPE) return decodeValues(reply.body, asked);
  throw malformed(
    `it answered ${reply.status} with ${type || "no content-type"} to a call for ${asked.want}`,
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

function encodeValues(request: ForwardRequest, kind: ValueKind, values: Uint16Array, widths: Widths): Reply {
  const width = widthOf(kind, widths);
  const rectangle = rectangleOfReply(request, kind);
  const shape = rectangle ? [rectangle.lengths.length, rectangle.slots, width] : [values.length / width, width];
  const padded = rectangle ? pad(values, rectangle, width) : values;
  const isMasked = rectangle !== undefined && kind !== "logits" && isPadded(rectangle);

  if (request.spelling === "container") {
    const tensors = [{ name: tensorName(kind), dtype: "BF16", shape, data: padded } as const];
    const mask = isMasked
      ? [{ name: "attention_mask", dtype: "U8", shape: shape.slice(0, 2), data: maskOf(rectangle) } as const]
      : [];
    return { status: 200, headers: { "Content-Type": CONTAINER_TYPE }, body: encodeContainer([...tensors, ...mask]) };
  }
  const headers: Record<string, string> = { "Content-Type": RAW_TYPE, [HEADERS.shape]: shape.join(",") };
  // Whoever sent text has no mask yet, and needs one to pass the hidden states on by hand.
  if (request.spelling === "text" && isMasked) headers[HEADERS.attentionMask] = encodeBase64(maskOf(rectangle));
  return { status: 200, headers, body: bytesOf(padded) };
}

function encodeTokens(
  request: ForwardRequest,
  result: Extract<ForwardResult, { kind: "token" }>,
  head?: HeadText,
): Reply {
  const perRow = <T>(values: readonly T[]): (T | null)[] => {
    const taken = values.values();
    const lengths = request.rectangle?.lengths ?? request.rows.map(({ tokens }) => tokens);
    return lengths.map((length) => (length === 0 ? null : taken.next().value!));
  };
  const body = {
    token_ids: perRow(result.ids),
    finish: perRow(result.finish),
    ...(head && { text: perRow(head.text) }),
    ...(head?.promptTokenIds && { prompt_token_ids: head.promptTokenIds }),
  };
  return { status: 200, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

function decodeTokens(body: Uint8Array, { rows, vocabSize }: { rows: readonly ForwardRow[] } & Widths): ForwardResult {
  let reply: { token_ids?: unknown; finish?: unknown };
  try {
    reply = JSON.parse(new TextDecoder().decode(body)) ?? {};
  } catch (cause) {
    throw malformed("its token reply is not JSON", "is it a meshnet node?", { cause });
  }
  const { token_ids: ids, finish } = reply;
  const isId = (id: unknown) => Number.isInteger(id) && (id as number) >= 0 && (id as number) < vocabSize;
  if (!Array.isArray(ids) || ids.length !== rows.length || !ids.every(isId)) {
    throw malformed(
      `its token_ids are ${show(ids)}, for ${rows.length} rows and a vocabulary of ${vocabSize}`,
      "is it a meshnet node?",
    );
  }
  if (
    !Array.isArray(finish) ||
    finish.length !== rows.length ||
    !finish.every((end) => end === null || end === "stop")
  ) {
    throw malformed(`its finish is ${show(finish)}, for ${rows.length} rows`, "is it a meshnet node?");
  }
  return { kind: "token", ids, finish };
}

function decodeValues(
  body: Uint8Array,
  { rows, want, ...widths }: { rows: readonly ForwardRow[]; want: Want } & Widths,
): ForwardResult {
  const { tensors } = decodeContainer(body);
  const kind: ValueKind = tensors.has("logits") && (want === "logits" || want === "all_logits") ? want : "hidden";
  const name = tensorName(kind);
  const tokens = sum(rows.map((row) => row.tokens));
  const width = widthOf(kind, widths);
  const wanted = kind === "logits" ? [rows.length, 1, width] : [tokens, width];
  const tensor = tensors.get(name);
  if (tensor?.dtype === "BF16" && String(tensor.shape) === String(wanted)) return { kind, values: halves(tensor.data) };
  const found = tensor ? `${tensor.dtype} of shape [${tensor.shape}]` : "missing";
  throw malformed(
    `its ${name} is ${found}, and [${wanted}] in BF16 was asked for`,
    "is it the same version of meshnet?",
  );
}

const show = (value: unknown): string => (JSON.stringify(value) ?? "missing").slice(0, 100);
