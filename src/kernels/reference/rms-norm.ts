import { average } from "./layer-norm.ts";
import type { Matrix } from "./matrix.ts";

/** x / √(mean of x² + eps) · (weight + offset) over each row. */
export const rmsNorm = (x: Matrix, weight: ArrayLike<number>, eps: number, offset: number): number[][] =>
  x.map((values) => {
    const row = Array.from(values);
    const scale = 1 / Math.sqrt(average(row.map((value) => value ** 2)) + eps);
    return row.map((value, i) => value * scale * (weight[i]! + offset));
  });

/** Where some neighbouring heads lie in a row. */
export interface HeadColumns {
  first: number;
  heads: number;
  /** From one head to the next. */
  headStride: number;
  headDim: number;
}

/** The same over each of some heads of every row; what lies between them stays. */
export const headNorm = (
  x: Matrix,
  weight: ArrayLike<number>,
  eps: number,
  offset: number,
  { first, heads, headStride, headDim }: HeadColumns,
): number[][] =>
  x.map((values) => {
    const row = Array.from(values);
    for (let head = 0; head < heads; head++) {
      const at = first + head * headStride;
      row.splice(at, headDim, ...rmsNorm([row.slice(at, at + headDim)], weight, eps, offset)[0]!);
    }
    return row;
  });
