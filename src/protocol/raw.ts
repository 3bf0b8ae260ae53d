import { UserError } from "../base/errors.ts";
import { cut, quote } from "../base/quote.ts";
import { HEADERS, malformed, optional, readCallFields, readHeader, type Said } from "./headers.ts";
import { checkCall } from "./check.ts";
import type { Draft, Message, NodeFacts } from "./message.ts";
import { decodeSlots, firstSlot, type Rectangle, rectangleFromMask, strip } from "./rectangle.ts";
import { type RowFields, rowFieldsOfHeaders } from "./rows.ts";

export const RAW_TYPE = "application/octet-stream";

/** An `application/octet-stream` body: hidden states bfloat16 [B, S, D], shape and mask in the headers. */
export function readRaw({ headers, body }: Message, node: NodeFacts): Draft {
  const call = readCallFields(headers);
  checkCall(call, node);
  const [batch, slots, hiddenSize] = readShape(headers, body.length);
  const rectangle = optional(readHeader(headers, HEADERS.attentionMask), (said) =>
    rectangleFromMask(decodeSlots(said, batch, slots, 1), slots),
  ) ?? { slots, lengths: Array.from({ length: batch }, () => slots) };
  const fields = rowFieldsOfHeaders(headers, batch);
  checkPositionIds(headers, rectangle, fields);
  const values = strip(halves(body), rectangle, hiddenSize);
  return {
    spelling: "raw",
    call,
    payload: { kind: "hidden", hiddenSize, values },
    lengths: rectangle.lengths,
    fields,
    rectangle,
  };
}

/** bfloat16 bit patterns without a copy where the alignment allows it. */
export function halves(bytes: Uint8Array): Uint16Array {
  const aligned = bytes.byteOffset % 2 === 0 ? bytes : new Uint8Array(bytes);
  return new Uint16Array(aligned.buffer, aligned.byteOffset, aligned.length / 2);
}

/** The positions a caller believes in, against the ones the mask gives; what padded slots hold is ignored. */
export function checkPositionIds(headers: Headers, rectangle: Rectangle, fields: readonly RowFields[]): void {
  const said = readHeader(headers, HEADERS.positionIds);
  if (said === undefined) return;
  const { slots, lengths } = rectangle;
  const bytes = decodeSlots(said, lengths.length, slots, 4);
  const positions = new DataView(bytes.buffer, bytes.byteOffset);
  lengths.forEach((_, row) => {
    const first = firstSlot(rectangle, row);
    for (let slot = first; slot < slots; slot++) {
      const given = positions.getInt32((row * slots + slot) * 4, true);
      const derived = (fields[row]?.positionStart ?? 0) + slot - first;
      if (given === derived) continue;
      throw new UserError(
        "position_ids",
        `${said.where} has ${given} in row ${row} at slot ${slot}, and the mask makes it position ${derived}`,
        "leave the header away: positions count the real tokens of a sequence from 0",
        { details: { row } },
      );
    }
  });
}

function readShape(headers: Headers, bodyBytes: number): [batch: number, slots: number, hiddenSize: number] {
  const said = readHeader(headers, HEADERS.shape);
  if (said === undefined) {
    throw malformed(`header ${HEADERS.shape} is missing`, "a raw body needs it: B,S,D as in 1,5,768");
  }
  const shape = parseShape(said);
  if (bodyBytes % 2 !== 0) {
    throw malformed(`the body has ${bodyBytes} bytes, an odd number`, "send bfloat16: two bytes for each value");
  }
  // In big integers, since three header values can multiply to anything; nothing is allocated before they agree.
  const wanted = shape.reduce((product, factor) => product * BigInt(factor), 2n);
  if (wanted === BigInt(bodyBytes)) return shape;
  throw malformed(
    `${said.where} ${cut(shape.join(","))} in bfloat16 takes ${wanted} bytes, and the body has ${bodyBytes}`,
    "make the shape and the body agree",
  );
}

function parseShape({ where, text }: Said): [number, number, number] {
  const shape = text.split(",").map((part) => (/^\d{1,15}$/.test(part.trim()) ? Number(part) : 0));
  if (shape.length === 3 && shape.every((factor) => factor > 0)) return shape as [number, number, number];
  throw malformed(
    `${where} is ${quote(text)}`,
    "write three whole numbers above 0: rows, slots, hidden size, as in 1,5,768",
  );
}
