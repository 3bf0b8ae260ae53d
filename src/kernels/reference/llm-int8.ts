import { roundBf16 } from "./bf16.ts";
import type { Matrix } from "./matrix.ts";
import { dequantizeInt8, type Int8 } from "./quantize.ts";

// LLM.int8() as bitsandbytes 0.50 computes it on a CPU in evaluation mode (`autograd/_functions.py`, MatMul8bitLt;
// `backends/default/ops.py`), step by step. x: [tokens, in], rounded to bfloat16 here.

const f32 = Math.fround;
const THRESHOLD = 6;

/** Columns with a value of 6 or more in any row. */
export function outlierColumns(x: Matrix): number[] {
  const columns = Array.from({ length: x[0]!.length }, (_, column) => column);
  return columns.filter((column) => x.some((row) => isOutlier(roundBf16(row[column]!))));
}

export interface Int8Rows {
  /** [tokens][in], -127 to 127 */
  readonly codes: number[][];
  /** Of each row: the largest magnitude that is no outlier. */
  readonly scale: number[];
}

export function quantizeRows(x: Matrix): Int8Rows {
  const outliers = new Set(outlierColumns(x));
  const half = x.map((row) => Array.from(row, (value) => roundF16(roundBf16(value))));
  const scale = half.map((row) => Math.max(0, ...row.filter((value) => !isOutlier(value)).map(Math.abs)));
  const codes = half.map((row, r) => {
    const factor = f32(f32(1 / scale[r]!) * 127); // torch divides a number by a tensor so
    return row.map((value, column) =>
      scale[r] === 0 || outliers.has(column) ? 0 : roundHalfEven(f32(value * factor)),
    );
  });
  return { codes, scale };
}

/** [tokens, out], bfloat16. */
export function llmInt8(x: Matrix, weight: Int8, bias?: ArrayLike<number>): number[][] {
  const { codes, scale } = quantizeRows(x);
  const columns = outlierColumns(x);
  const wide = dequantizeInt8(weight);
  return x.map((row, r) =>
    weight.codes.map((weightRow, output) => {
      const total = sum(weightRow.map((code, column) => code * codes[r]![column]!));
      const scaled = f32(f32(f32(total) * f32(scale[r]! * weight.scb[output]!)) * f32(6.200124e-5));
      const product = roundBf16(bias ? f32(scaled + bias[output]!) : scaled);
      if (columns.length === 0) return product;
      let outliers = 0;
      for (const column of columns) outliers = f32(outliers + roundBf16(row[column]!) * wide[output]![column]!);
      return roundBf16(f32(product + outliers));
    }),
  );
}

const isOutlier = (value: number): boolean => Math.abs(value) >= THRESHOLD;

const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);

const roundF16 = (value: number): number => new Float16Array([value])[0]!;

function roundHalfEven(value: number): number {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value) + 0; // + 0: never -0
  return floor % 2 === 0 ? floor : floor + 1;
}
