import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { cut, quote } from "../base/quote.ts";
import { type Container, decodeContainer, encodeContainer } from "./container.ts";
import { checkCrc32c } from "./digest.ts";
import { HEADERS, malformed, PROTOCOL_VERSION, readCallFields } from "./headers.ts";
import { checkCall, checkHead } from "./check.ts";
import type { Draft, ForwardRow, Message, NodeFacts, Payload } from "./message.ts";
import { halves } from "./raw.ts";
import { type Rectangle, rectangleFromMask, strip } from "./rectangle.ts";
import { mergeRowFields, type RowFields, rowFieldsOfHeaders, rowFieldsOfMetadata } from "./rows.ts";

/** One row of a frame: what the next node is told of it. */
export type FrameRow = Omit<ForwardRow, "index" | "problem">;

/** What a node sends to the next one: rows of any number of calls. */
export interface Frame {
  /** [T, hiddenSize] bfloat16 */
  readonly values: Uint16Array;
  readonly hiddenSize: number;
  /** [T] The tokens' ids, where they are known. */
  readonly tokenIds?: Int32Array;
  readonly rows: readonly FrameRow[];
  readonly model: string;
  readonly fromLayer: number;
  readonly requestId: string;
  readonly deadlineMs: number;
  readonly route?: readonly string[];
}

export function encodeFrame(frame: Frame): Uint8Array {
  const { values, hiddenSize, tokenIds, rows } = frame;
  const hidden = [values.length / hiddenSize, hiddenSize];
  return encodeContainer(
    [
      { name: "hidden_states", dtype: "BF16", shape: hidden, data: values },
      ...(tokenIds ? [{ name: "token_ids", dtype: "I32", shape: [tokenIds.length], data: tokenIds } as const] : []),
    ],
    {
      v: String(PROTOCOL_VERSION),
      from_layer: String(frame.fromLayer),
      model: frame.model,
      rows: JSON.stringify(rows.map(rowMetadata)),
      request_id: frame.requestId,
      deadline_ms: String(frame.deadlineMs),
      ...(frame.route && { route: JSON.stringify(frame.route) }),
    },
  );
}

function rowMetadata({ tokens, positionStart, session, step, maxLen, prefix, want, sampling }: FrameRow): object {
  return { session, pos_start: positionStart, n: tokens, step, max_len: maxLen, prefix, want, sampling };
}

/** An `application/x-safetensors` body: rows of hidden states or of token ids, or a rectangle with its mask. */
export function readContainer({ headers, body }: Message, node: NodeFacts): Draft {
  const container = decodeContainer(body);
  const call = readCallFields(headers, container.metadata);
  checkCrc32c(container.metadata["crc32c"], container.data);
  checkCall(call, node);
  for (const name of [HEADERS.shape, HEADERS.attentionMask, HEADERS.positionIds]) {
    if (headers.has(name))
      throw malformed(`header ${name} came with a container`, "the tensors of a container say it: leave it away");
  }
  const { payload, tokenIds, rectangle } = readTensors(container, node);
  const said = container.metadata["rows"];
  const inside = said === undefined ? undefined : rowFieldsOfMetadata(said);
  const lengths = rowLengths(inside, rectangle, payload);
  const fields = mergeRowFields(inside ?? lengths.map(() => ({})), rowFieldsOfHeaders(headers, lengths.length));
  return { spelling: "container", call, payload, tokenIds, lengths, fields, rectangle };
}

const TENSORS = {
  hidden_states: { dtype: "BF16", rank: [2, 3], shape: "[T, D], or [B, S, D] with attention_mask" },
  attention_mask: { dtype: "U8", rank: [2], shape: "[B, S]" },
  input_ids: { dtype: "I32", rank: [1], shape: "[T]" },
  token_ids: { dtype: "I32", rank: [1], shape: "[T]" },
} as const;

function readTensors(
  { tensors }: Container,
  node: NodeFacts,
): Pick<Draft, "payload" | "tokenIds"> & { rectangle?: Rectangle } {
  for (const [name, { dtype, shape }] of tensors) checkTensor(name, dtype, shape);
  const hidden = tensors.get("hidden_states");
  const ids = tensors.get("input_ids");
  if ((hidden === undefined) === (ids === undefined)) {
    throw malformed(
      `the container has ${hidden ? "both" : "neither"} of hidden_states and input_ids`,
      "send one of them",
    );
  }
  if (ids) {
    checkHead("a container of input_ids", node);
    return { payload: { kind: "ids", ids: integers(ids.data), fromText: false } };
  }

  const { shape, data } = hidden!;
  const hiddenSize = shape.at(-1)!;
  if (shape.includes(0))
    throw new UserError("empty_prompt", `hidden_states has the shape [${cut(`${shape}`)}]`, "send at least one token");
  const values = halves(data);
  const rectangle = rectangleOfTensors(shape, tensors.get("attention_mask"));
  const payload = {
    kind: "hidden",
    hiddenSize,
    values: rectangle ? strip(values, rectangle, hiddenSize) : values,
  } as const;
  const tokenIds = readTokenIds(tensors.get("token_ids"), values.length / hiddenSize);
  return { payload, tokenIds: tokenIds && rectangle ? strip(tokenIds, rectangle, 1) : tokenIds, rectangle };
}

function checkTensor(name: string, dtype: string, shape: readonly number[]): void {
  if (!Object.hasOwn(TENSORS, name)) {
    throw malformed(`the container has the unknown tensor ${quote(name)}`, `known: ${Object.keys(TENSORS).join(", ")}`);
  }
  const wanted = TENSORS[name as keyof typeof TENSORS];
  if (dtype === wanted.dtype && (wanted.rank as readonly number[]).includes(shape.length)) return;
  throw malformed(
    `${name} is ${cut(dtype)} of shape [${cut(`${shape}`)}]`,
    `send it as ${wanted.dtype} of shape ${wanted.shape}`,
  );
}

function rectangleOfTensors(
  shape: readonly number[],
  mask: { shape: readonly number[]; data: Uint8Array } | undefined,
): Rectangle | undefined {
  const [batch, slots] = shape as [number, number];
  if (mask === undefined) {
    return shape.length === 3 ? { slots, lengths: Array.from({ length: batch }, () => slots) } : undefined;
  }
  if (shape.length === 3 && mask.shape[0] === batch && mask.shape[1] === slots)
    return rectangleFromMask(mask.data, slots);
  throw malformed(
    `attention_mask is [${cut(`${mask.shape}`)}], and hidden_states [${cut(`${shape}`)}]`,
    "a mask [B, S] goes with hidden states [B, S, D]",
  );
}

/** As many as the hidden states have tokens, padded slots included. */
function readTokenIds(
  ids: { shape: readonly number[]; data: Uint8Array } | undefined,
  tokens: number,
): Int32Array | undefined {
  if (ids === undefined) return undefined;
  if (ids.shape[0] === tokens) return integers(ids.data);
  throw malformed(`token_ids has ${ids.shape[0]} ids for ${tokens} tokens`, "send one id for each token");
}

function rowLengths(
  rows: readonly RowFields[] | undefined,
  rectangle: Rectangle | undefined,
  payload: Payload,
): readonly number[] {
  const tokens = payload.kind === "ids" ? payload.ids.length : payload.values.length / payload.hiddenSize;
  if (rows === undefined) return rectangle?.lengths ?? [tokens];
  if (rectangle) {
    const odd =
      rows.length === rectangle.lengths.length
        ? rows.findIndex(({ n }, row) => n !== undefined && n !== rectangle.lengths[row])
        : 0;
    if (odd < 0) return rectangle.lengths;
    throw malformed(
      `metadata rows gives [${cut(`${rows.map(({ n }) => n ?? "?")}`)}] tokens, and the mask [${cut(`${rectangle.lengths}`)}]`,
      "leave n away: the mask says it",
    );
  }
  const lengths = rows.map(({ n }, row) => {
    if (n !== undefined && n > 0) return n;
    throw malformed(`metadata rows[${row}].n is ${n ?? "missing"}`, "give the row's number of tokens, at least 1");
  });
  if (sum(lengths) === tokens) return lengths;
  throw malformed(`metadata rows adds up to ${sum(lengths)} tokens, and the tensor has ${tokens}`, "make them agree");
}

/** Little-endian int32 at any alignment. */
function integers(bytes: Uint8Array): Int32Array {
  const aligned = bytes.byteOffset % 4 === 0 ? bytes : new Uint8Array(bytes);
  return new Int32Array(aligned.buffer, aligned.byteOffset, aligned.length / 4);
}
