import { roundBf16 } from "./bf16.ts";
import { type Matrix, matrixOf } from "./matrix.ts";

export const add = (x: Matrix, y: Matrix, round: boolean): number[][] =>
  matrixOf(x.length, x[0]!.length, (row, column) => {
    const sum = Math.fround(x[row]![column]! + y[row]![column]!);
    return round ? roundBf16(sum) : sum;
  });
