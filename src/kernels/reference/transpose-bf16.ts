import { type Matrix, matrixOf } from "./matrix.ts";

export const transpose = (x: Matrix): number[][] => matrixOf(x[0]!.length, x.length, (row, column) => x[column]![row]!);
