import type { Matrix } from "./matrix.ts";

/** (x - mean) / √(variance + eps) · weight + bias over each row, with the biased variance. */
export const layerNorm = (x: Matrix, weight: ArrayLike<number>, bias: ArrayLike<number>, eps: number): number[][] =>
  x.map((values) => {
    const row = Array.from(values);
    const mean = average(row);
    const variance = average(row.map((value) => (value - mean) ** 2));
    return row.map((value, i) => ((value - mean) / Math.sqrt(variance + eps)) * weight[i]! + bias[i]!);
  });

export const average = (values: readonly number[]): number =>
  values.reduce((total, value) => total + value, 0) / values.length;
