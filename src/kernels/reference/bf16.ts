import { type Matrix, matrixOf } from "./matrix.ts";

/** The bfloat16 value nearest to a number, of two equally near ones the even: eight significant bits, down to 2^-133. */
export function roundBf16(value: number): number {
  if (value === 0 || !Number.isFinite(value)) return value;
  const magnitude = Math.abs(value);
  const exponent = Math.max(Math.floor(Math.log2(magnitude)), -126);
  const step = 2 ** (exponent - 7);
  const rounded = roundHalfToEven(magnitude / step) * step;
  return Math.sign(value) * (rounded < 2 ** 128 ? rounded : Infinity);
}

function roundHalfToEven(value: number): number {
  const below = Math.floor(value);
  if (value - below !== 0.5) return Math.round(value);
  return below % 2 === 0 ? below : below + 1;
}

/** The 16 bits of a bfloat16 value: the upper half of the float32. */
export function bitsOfBf16(value: number): number {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint16(0);
}

export function bf16OfBits(bits: number): number {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint16(0, bits);
  return view.getFloat32(0);
}

/** [rows, columns] in a row, without padding, as 16-bit patterns. */
export const packBf16 = (x: Matrix): number[] =>
  x.flatMap((row) => Array.from(row, (value) => bitsOfBf16(roundBf16(value))));

export const unpackBf16 = (bits: ArrayLike<number>, rows: number, columns: number): number[][] =>
  matrixOf(rows, columns, (row, column) => bf16OfBits(bits[row * columns + column]!));
