import { describe, expect, test } from "bun:test";
import { byteCount, type ByteRange, joined, split, without } from "../../src/hub/ranges.ts";
import { seededRandom } from "../support/safetensors.ts";

const ranges = (...pairs: [number, number][]): ByteRange[] => pairs.map(([begin, end]) => ({ begin, end }));

test("ranges that overlap or touch become one, and empty ones none", () => {
  expect(joined(ranges([5, 9], [0, 2], [2, 4], [7, 12], [20, 20]))).toEqual(ranges([0, 4], [5, 12]));
});

test("ranges are joined over a gap that is smaller than said", () => {
  expect(joined(ranges([0, 10], [19, 30]), 10)).toEqual(ranges([0, 30]));
  expect(joined(ranges([0, 10], [20, 30]), 10)).toEqual(ranges([0, 10], [20, 30]));
});

test("what is there is taken out of what is wanted", () => {
  expect(without(ranges([0, 10], [20, 30]), ranges([2, 4], [8, 22], [29, 40]))).toEqual(
    ranges([0, 2], [4, 8], [22, 29]),
  );
  expect(without(ranges([0, 10]), [])).toEqual(ranges([0, 10]));
  expect(without(ranges([3, 4]), ranges([0, 10]))).toEqual([]);
});

test("a long range is cut into pieces, the last as long as remains", () => {
  expect(split(ranges([3, 10], [20, 21]), 3)).toEqual(ranges([3, 6], [6, 9], [9, 10], [20, 21]));
});

describe("as sets of bytes", () => {
  test.each([1, 2, 3, 4, 5])("they are what they should be (seed %d)", (seed) => {
    const random = seededRandom(seed);
    const some = () =>
      Array.from({ length: 6 }, () => Math.floor(random() * 50)).map((begin) => ({
        begin,
        end: begin + Math.floor(random() * 8),
      }));
    for (let i = 0; i < 200; i++) {
      const [wanted, have] = [some(), some()];
      const left = without(joined(wanted), joined(have));
      const expected = bytes(wanted).difference(bytes(have));
      expect(bytes(left)).toEqual(expected);
      expect(byteCount(left)).toBe(expected.size);
      expect(bytes(split(joined(wanted), 3))).toEqual(bytes(wanted));
    }
  });
});

const bytes = (list: readonly ByteRange[]): Set<number> =>
  new Set(
    list
      .flatMap(({ begin, end }) => Array.from({ length: end - begin }, (_, i) => begin + i))
      .toSorted((a, b) => a - b),
  );
