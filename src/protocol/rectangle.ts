import { bytesOf, sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { malformed } from "./headers.ts";

/**
 * How rows lie in a left-padded [B, S] rectangle. Row b has its `lengths[b]` real tokens in its last slots, so the mask
 * says nothing that the lengths do not. A length of 0: the row takes no part.
 */
export interface Rectangle {
  readonly slots: number;
  readonly lengths: readonly number[];
}

type Values = Uint16Array | Int32Array;

export const rectangleOf = (lengths: readonly number[]): Rectangle => ({ slots: Math.max(...lengths), lengths });

export const isPadded = ({ slots, lengths }: Rectangle): boolean => lengths.some((length) => length < slots);

/** The first real slot of a row. */
export const firstSlot = ({ slots, lengths }: Rectangle, row: number): number => slots - lengths[row]!;

/** `mask`: [B, S], 1 = real. Throws UserError `right_padding` where a row is not zeros, then ones. */
export function rectangleFromMask(mask: Uint8Array, slots: number): Rectangle {
  const lengths: number[] = [];
  for (let start = 0; start < mask.length; start += slots) {
    lengths.push(rowLength(mask.subarray(start, start + slots), start / slots));
  }
  return { slots, lengths };
}

/** [B, S] of 0 and 1. */
export function maskOf(rectangle: Rectangle): Uint8Array {
  const { slots, lengths } = rectangle;
  const mask = new Uint8Array(lengths.length * slots);
  for (let row = 0; row < lengths.length; row++)
    mask.fill(1, row * slots + firstSlot(rectangle, row), (row + 1) * slots);
  return mask;
}

/** [B, S, width] → [T, width]: the real tokens, row after row. The same array where nothing is padded. */
export function strip<T extends Values>(values: T, rectangle: Rectangle, width: number): T {
  if (!isPadded(rectangle)) return values;
  const rows = newLike(values, sum(rectangle.lengths) * width);
  forEachRow(rectangle, width, (from, to, length) => rows.set(values.subarray(from, from + length), to));
  return rows;
}

/** [T, width] → [B, S, width], padded slots zero. The same array where nothing is padded. */
export function pad<T extends Values>(values: T, rectangle: Rectangle, width: number): T {
  if (!isPadded(rectangle)) return values;
  const padded = newLike(values, rectangle.lengths.length * rectangle.slots * width);
  forEachRow(rectangle, width, (to, from, length) => padded.set(values.subarray(from, from + length), to));
  return padded;
}

/** Decodes [B, S] values from the base64 of a header. Throws UserError `malformed` with both byte counts. */
export function decodeSlots(
  said: { where: string; text: string },
  batch: number,
  slots: number,
  width: 1 | 4,
): Uint8Array {
  const bytes = decodeBase64(said);
  const wanted = batch * slots * width;
  if (bytes.length === wanted) return bytes;
  throw malformed(
    `${said.where} holds ${bytes.length} bytes, and ${batch} rows of ${slots} slots take ${wanted}`,
    `send base64 of ${width === 1 ? "uint8" : "little-endian int32"} of shape [${batch}, ${slots}]: this call only`,
  );
}

export const encodeBase64 = (view: ArrayBufferView): string => Buffer.from(bytesOf(view)).toString("base64");

/** Calls `visit` with where each row begins in the rectangle and among the rows, and how long it is, in values. */
function forEachRow(
  rectangle: Rectangle,
  width: number,
  visit: (inRectangle: number, inRows: number, length: number) => void,
): void {
  let inRows = 0;
  rectangle.lengths.forEach((length, row) => {
    visit((row * rectangle.slots + firstSlot(rectangle, row)) * width, inRows, length * width);
    inRows += length * width;
  });
}

function rowLength(mask: Uint8Array, row: number): number {
  const ones = mask.indexOf(1);
  const first = ones < 0 ? mask.length : ones;
  for (let slot = 0; slot < mask.length; slot++) {
    const value = mask[slot]!;
    if (value > 1)
      throw malformed(`the attention mask of row ${row} has ${value} at slot ${slot}`, "a mask holds 0 and 1");
    if (value === (slot < first ? 0 : 1)) continue;
    throw new UserError(
      "right_padding",
      `the attention mask of row ${row} has a 0 at slot ${slot}, after the 1 at slot ${first}`,
      "pad on the left: in each row zeros, then ones",
      { details: { row } },
    );
  }
  return mask.length - first;
}

function decodeBase64({ where, text }: { where: string; text: string }): Uint8Array {
  if (text.length % 4 === 0 && /^[A-Za-z0-9+/]*={0,2}$/.test(text)) return new Uint8Array(Buffer.from(text, "base64"));
  throw malformed(`${where} is not base64`, "encode it with the standard alphabet, padded with =");
}

function newLike<T extends Values>(values: T, length: number): T {
  return (values instanceof Uint16Array ? new Uint16Array(length) : new Int32Array(length)) as T;
}
