import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { type Container, decodeContainer, encodeContainer } from "./container.ts";
import { checkCrc32c } from "./digest.ts";
import { HEADERS, malformed, PROTOCOL_VERSION, readCallFields } from "./headers.ts";
import { checkCall, checkHead } from "./check.ts";
import type { Draft, ForwardRow, Message, NodeFacts, Payload } from "./message.ts";
import { halves } from "./raw.ts";
import { type Rectangle, rectangleFromMask, strip } from "./rectangle.ts";
import { mergeRowFields, type RowFields, rowFieldsOfHeaders, rowFieldsOfMetadata, type Want } from "./rows.ts";

/** What a node sends to the next one. */
export interface Frame {
  /** [T, hiddenSize] bfloat16 */
  readonly values: Uint16Array;
  readonly hiddenSize: number;
  readonly rows: readonly ForwardRow[];
  readonly want: Want;
  readonly model: string;
  readonly fromLayer: number;
  readonly requestId: string;
  readonly deadlineMs: number;
  readonly route?: readonly string[];
}

export function encodeFrame(frame: Frame): Uint8Array {
  const { values, hiddenSize, rows, want } = frame;
  return encodeContainer(
    [{ name: "hidden_states", dtype: "BF16", shape: [values.length / hiddenSize, hiddenSize], data: values }],
    {
      v: String(PROTOCOL_VERSION),
      from_layer: String(frame.fromLayer),
      model: frame.model,
      rows: JSON.stringify(rows.map(({ tokens, positionStart }) => ({ pos_start: positionStart, n: tokens, want }))),
      request_id: frame.requestId,
      deadline_ms: String(frame.deadlineMs),
      ...(frame.route && { route: JSON.stringify(frame.route) }),
    },
  );
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
  const { payload, rectangle } = readTensors(container, node);
  const said = container.metadata["rows"];
  const inside = said === undefined ? undefined : rowFieldsOfMetadata(said);
  const lengths = rowLengths(inside, rectangle, payload);
  const fields = mergeRowFields(inside ?? lengths.map(() => ({})), rowFieldsOfHeaders(headers, lengths.length));
  return { spelling: "container", call, payload, lengths, fields, rectangle };
}

const TENSORS = {
  hidden_states: { dtype: "BF16", rank: [2, 3], shape: "[T, D], or [B, S, D] with attention_mask" },
  attention_mask: { dtype: "U8", rank: [2], shape: "[B, S]" },
  input_ids: { dtype: "I32", rank: [1], shape: "[T]" },
  token_ids: { dtype: "I32", rank: [1], shape: "[T]" },
} as const;

function readTensors({ tensors }: Container, node: NodeFacts): { payload: Payload; rectangle?: Rectangle } {
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
    throw new UserError("empty_prompt", `hidden_states has the shape [${shape}]`, "send at least one token");
  const values = halves(data);
  const rectangle = rectangleOfTensors(shape, tensors.get("attention_mask"));
  const payload = {
    kind: "hidden",
    hiddenSize,
    values: rectangle ? strip(values, rectangle, hiddenSize) : values,
  } as const;
  checkTokenIds(tensors.get("token_ids"), values.length / hiddenSize);
  return { payload, rectangle };
}

function checkTensor(name: string, dtype: string, shape: readonly number[]): void {
  if (!Object.hasOwn(TENSORS, name)) {
    throw malformed(`the container has the unknown tensor "${name}"`, `known: ${Object.keys(TENSORS).join(", ")}`);
  }
  const wanted = TENSORS[name as keyof typeof TENSORS];
  if (dtype === wanted.dtype && (wanted.rank as readonly number[]).includes(shape.length)) return;
  throw malformed(`${name} is ${dtype} of shape [${shape}]`, `send it as ${wanted.dtype} of shape ${wanted.shape}`);
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
    `attention_mask is [${mask.shape}], and hidden_states [${shape}]`,
    "a mask [B, S] goes with hidden states [B, S, D]",
  );
}

/** They are for sampling with the history, which is not here yet: looked at, and left alone. */
function checkTokenIds(ids: { shape: readonly number[] } | undefined, tokens: number): void {
  if (ids === undefined || ids.shape[0] === tokens) return;
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
      `metadata rows gives [${rows.map(({ n }) => n ?? "?")}] tokens, and the mask [${rectangle.lengths}]`,
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
