import { roundBf16 } from "./bf16.ts";
import type { Matrix } from "./matrix.ts";

// What bitsandbytes makes of a weight (functional.py, models of `Linear4bit` and `Linear8bitLt`), as plainly as it goes.
// Rows: [out, in], bfloat16 values.

const f32 = Math.fround;

/** The code book of NF4, float32. */
export const NF4 = [
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
  -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
].map(f32);

/** The code book of FP4, float32: the highest of four bits is the sign. */
const FP4_MAGNITUDES = [
  0, 0.0052083334885537624, 0.6666666865348816, 1, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
].map(f32);
export const FP4 = [...FP4_MAGNITUDES, ...FP4_MAGNITUDES.map((value) => -value)];

const THRESHOLDS = NF4.slice(1).map((code, index) => f32(f32(NF4[index]! + code) / 2));
const BLOCK = 64;

export interface Nf4 {
  /** [rows][columns] */
  readonly codes: number[][];
  /** Of each block of 64 of the matrix laid out row after row. */
  readonly absmax: number[];
}

export function quantizeNf4(weight: Matrix): Nf4 {
  const columns = weight[0]!.length;
  const flat = weight.flatMap((row) => Array.from(row));
  const absmax: number[] = [];
  for (let at = 0; at < flat.length; at += BLOCK) absmax.push(Math.max(...flat.slice(at, at + BLOCK).map(Math.abs)));
  const codes = flat.map((value, index) => {
    const scaled = f32(value * f32(1 / Math.max(absmax[Math.floor(index / BLOCK)]!, f32(1e-38))));
    return THRESHOLDS.filter((threshold) => threshold < scaled).length;
  });
  return { codes: weight.map((_, row) => codes.slice(row * columns, (row + 1) * columns)), absmax };
}

export const dequantizeNf4 = (weight: Nf4): number[][] => dequantize4bit(weight, NF4);

/** By either code book. */
export const dequantize4bit = ({ codes, absmax }: Nf4, book: readonly number[]): number[][] =>
  codes.map((row, r) =>
    row.map((code, c) => roundBf16(f32(book[code]! * absmax[Math.floor((r * row.length + c) / BLOCK)]!))),
  );

export interface Int8 {
  /** [rows][columns], -127 to 127 */
  readonly codes: number[][];
  /** Of each row. */
  readonly scb: number[];
}

export function quantizeInt8(weight: Matrix): Int8 {
  const half = weight.map((row) => Array.from(row, roundF16));
  const scb = half.map((row) => Math.max(...row.map(Math.abs)));
  const codes = half.map((row, r) => {
    const scale = f32(f32(1 / scb[r]!) * 127);
    return row.map((value) => (scb[r] === 0 ? 0 : roundHalfEven(f32(value * scale))));
  });
  return { codes, scb };
}

export const dequantizeInt8 = ({ codes, scb }: Int8): number[][] =>
  codes.map((row, r) => row.map((code) => roundBf16(f32(f32(code * scb[r]!) * f32(1 / 127)))));

const roundF16 = (value: number): number => new Float16Array([value])[0]!;

function roundHalfEven(value: number): number {
  const floor = Math.floor(value);
  const rest = value - floor;
  if (rest !== 0.5) return Math.round(value) + 0; // + 0: never -0
  return floor % 2 === 0 ? floor : floor + 1;
}
