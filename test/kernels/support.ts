import { expect } from "bun:test";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";

export { cacheRow } from "../../src/engine/self-test/attention.ts";
export { Bench, isUnwritten } from "../../src/engine/self-test/bench.ts";
export { Sampler } from "../../src/engine/self-test/sampler.ts";

/** Half a unit in the last place of a float32: the relative error of one rounding. A unit in the last place is 2 U. */
export const U = 2 ** -24;
/** Results below the smallest normal float32 may be flushed to zero. */
export const SMALLEST_NORMAL = 2 ** -126;

/** Every value within its bound. A failure names the first that is not. */
export function expectWithin(actual: Matrix, expected: Matrix, bound: (row: number, column: number) => number): void {
  expect(actual.length).toBe(expected.length);
  let wrong: object | undefined;
  expected.forEach((values, row) => {
    if (actual[row]!.length !== values.length) wrong ??= { row, columns: actual[row]!.length, not: values.length };
    for (let column = 0; column < values.length && !wrong; column++) {
      const [is, should, allowed] = [actual[row]![column]!, values[column]!, bound(row, column)];
      if (!(Math.abs(is - should) <= allowed)) wrong = { row, column, is, should, allowed, off: is - should };
    }
  });
  expect(wrong).toBeUndefined();
}

/** Every value the same, to the bit. A failure names the first that is not. */
export function expectSame(actual: Matrix, expected: Matrix): void {
  expect(actual.length).toBe(expected.length);
  let wrong: object | undefined;
  expected.forEach((values, row) => {
    if (actual[row]!.length !== values.length) wrong ??= { row, columns: actual[row]!.length, not: values.length };
    for (let column = 0; column < values.length && !wrong; column++) {
      const [is, should] = [actual[row]![column]!, values[column]!];
      if (!Object.is(is, should)) wrong = { row, column, is, should };
    }
  });
  expect(wrong).toBeUndefined();
}

/** [begin, begin + 1, … end) */
export const range = (begin: number, end: number): number[] => Array.from({ length: end - begin }, (_, i) => begin + i);

export const absolute = (x: Matrix): number[][] => x.map((row) => Array.from(row, Math.abs));
