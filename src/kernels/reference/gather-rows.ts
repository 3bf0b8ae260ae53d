import type { Matrix } from "./matrix.ts";

export const gatherRows = (x: Matrix, index: readonly number[]): Matrix => index.map((row) => x[row]!);
