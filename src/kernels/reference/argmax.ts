import type { Matrix } from "./matrix.ts";

/** The lowest column that holds the largest value of each row, or `notAToken` where a value is NaN. */
export const argmax = (x: Matrix, notAToken: number): number[] =>
  x.map((row) => {
    let best = 0;
    for (let column = 0; column < row.length; column++) {
      if (Number.isNaN(row[column]!)) return notAToken;
      if (row[column]! > row[best]!) best = column;
    }
    return best;
  });
