import { bytesOf } from "../base/bytes.ts";

/**
 * bfloat16 is the upper half of a float32. Every rounding is to nearest, ties to even, done on bit patterns; a NaN
 * stays a quiet NaN of the same sign. A bulk call takes whole arrays, because a value alone costs a function call.
 */

const float = new Float32Array(1);
const bits = new Int32Array(float.buffer);

/** The 16 bits of the bfloat16 nearest to a float32 (or to a number, rounded to float32 first). */
export function f32ToBf16(value: number): number {
  float[0] = value;
  return roundBits(bits[0]!) & 0xffff;
}

/** Exact. */
export function bf16ToF32(value: number): number {
  bits[0] = value << 16;
  return float[0]!;
}

/** The upper 16 bits are the result. Signed arithmetic keeps the value in 32 bits: only a NaN could overflow. */
function roundBits(f32: number): number {
  if ((f32 & 0x7fffffff) > 0x7f800000) return (f32 >> 16) | 0x40; // adding could carry a NaN into another value
  return (f32 + 0x7fff + ((f32 >>> 16) & 1)) >> 16;
}

export function f32ArrayToBf16(
  source: Float32Array,
  target: Uint16Array = new Uint16Array(source.length),
): Uint16Array {
  roundAll(source.buffer, source.byteOffset, target.subarray(0, source.length));
  return target;
}

export function bf16ArrayToF32(
  source: Uint16Array,
  target: Float32Array = new Float32Array(source.length),
): Float32Array {
  const out = new Int32Array(target.buffer, target.byteOffset, source.length);
  for (let i = 0; i < source.length; i++) out[i] = source[i]! << 16;
  return target;
}

export type FloatDtype = "F32" | "F16" | "BF16";

/** `source`: little-endian elements of `dtype` at any alignment, as many as `target` has room for. */
export function convertToBf16(dtype: FloatDtype, source: Uint8Array, target: Uint16Array): void {
  const elementBytes = dtype === "F32" ? 4 : 2;
  if (source.length !== target.length * elementBytes) {
    throw new RangeError(`${source.length} bytes of ${dtype} are not ${target.length} elements`);
  }
  switch (dtype) {
    case "BF16":
      bytesOf(target).set(source);
      return;
    case "F16":
      inAlignedPieces(source, target, 2, lookUpAll);
      return;
    case "F32":
      inAlignedPieces(source, target, 4, roundAll);
  }
}

/** Where the first NaN or infinity is, or -1. */
export function indexOfNonFinite(values: Uint16Array): number {
  for (let i = 0; i < values.length; i++) if ((values[i]! & 0x7f80) === 0x7f80) return i;
  return -1;
}

/** Two values at a time: one store, and a NaN is looked for in both at once, which is 1.6 times as fast. */
function roundAll(source: ArrayBufferLike, offset: number, target: Uint16Array): void {
  if (target.length === 0) return;
  const values = new Int32Array(source, offset, target.length);
  const lead = (target.byteOffset % 4) / 2; // values before the first whole word
  const words = new Int32Array(target.buffer, target.byteOffset + lead * 2, (target.length - lead) >> 1);
  if (lead > 0) target[0] = roundBits(values[0]!);
  for (let word = 0, at = lead; word < words.length; word++, at += 2) {
    const low = values[at]!;
    const high = values[at + 1]!;
    if ((low & 0x7fffffff) > 0x7f800000 || (high & 0x7fffffff) > 0x7f800000) {
      words[word] = (roundBits(low) & 0xffff) | (roundBits(high) << 16);
    } else {
      const lowHalf = (low + 0x7fff + ((low >>> 16) & 1)) >>> 16;
      words[word] = lowHalf | ((high + 0x7fff + ((high >>> 16) & 1)) & 0xffff0000);
    }
  }
  const last = target.length - 1;
  if ((target.length - lead) % 2 === 1) target[last] = roundBits(values[last]!);
}

function lookUpAll(source: ArrayBufferLike, offset: number, target: Uint16Array): void {
  const halves = new Uint16Array(source, offset, target.length);
  const table = (f16ToBf16 ??= tabulateF16());
  for (let i = 0; i < halves.length; i++) target[i] = table[halves[i]!]!;
}

type Conversion = (source: ArrayBufferLike, offset: number, target: Uint16Array) => void;

const PIECE_ELEMENTS = 16384;

/** A typed array may only stand at a multiple of its element size; other bytes go through a small aligned buffer. */
function inAlignedPieces(source: Uint8Array, target: Uint16Array, elementBytes: number, convert: Conversion): void {
  if (source.byteOffset % elementBytes === 0) return convert(source.buffer, source.byteOffset, target);
  const aligned = new Uint8Array(PIECE_ELEMENTS * elementBytes);
  for (let start = 0; start < target.length; start += PIECE_ELEMENTS) {
    const end = Math.min(start + PIECE_ELEMENTS, target.length);
    aligned.set(source.subarray(start * elementBytes, end * elementBytes));
    convert(aligned.buffer, 0, target.subarray(start, end));
  }
}

let f16ToBf16: Uint16Array | undefined;

/** There are 65,536 halves: their roundings are looked up. bfloat16 has fewer fraction bits, so it rounds them too. */
function tabulateF16(): Uint16Array {
  const table = new Uint16Array(65536);
  const view = new DataView(new ArrayBuffer(2));
  for (let half = 0; half < table.length; half++) {
    view.setUint16(0, half);
    table[half] = f32ToBf16(view.getFloat16(0));
  }
  return table;
}
