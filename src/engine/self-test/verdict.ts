import type { Matrix } from "../../kernels/reference/matrix.ts";
import type { Verdict } from "./self-test.ts";

/** Every value the same, to the bit; else the first that is not. */
export const sameAs = (actual: Matrix, expected: Matrix): Verdict =>
  firstWrong(actual, expected, (is, should) => Object.is(is, should));

/** Every value within `bound` of what it should be, relative to the larger of 1 and that; else the first that is not. */
export const within = (actual: Matrix, expected: Matrix, bound: number): Verdict =>
  firstWrong(actual, expected, (is, should) => Math.abs(is - should) <= bound * Math.max(1, Math.abs(should)));

function firstWrong(actual: Matrix, expected: Matrix, isRight: (is: number, should: number) => boolean): Verdict {
  if (actual.length !== expected.length) return `${actual.length} rows where ${expected.length} were expected`;
  for (const [row, values] of expected.entries()) {
    const got = actual[row]!;
    if (got.length !== values.length) return `row ${row} has ${got.length} values, not ${values.length}`;
    for (let column = 0; column < values.length; column++) {
      const [is, should] = [got[column]!, values[column]!];
      if (!isRight(is, should)) return `row ${row}, column ${column} is ${text(is)} and should be ${text(should)}`;
    }
  }
  return undefined;
}

const text = (value: number): string => (Object.is(value, -0) ? "-0" : `${value}`);
