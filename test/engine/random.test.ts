import { expect, test } from "bun:test";
import { drawAt, philox, randomSeed, seedOfChoice } from "../../src/engine/random.ts";

// Random123, `kat_vectors`: philox4x32, 10 rounds.
test.each([
  [[0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"],
  [Array(4).fill(0xffffffff), Array(2).fill(0xffffffff), "408f276d 41c83b0e a20bc7c6 6d5451fd"],
  [[0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0], "d16cfe09 94fdcceb 5001e420 24126ea1"],
])("Philox of %p with the key %p is as published", (counter, key, words) => {
  expect(
    philox(counter, key)
      .map((word) => word.toString(16).padStart(8, "0"))
      .join(" "),
  ).toBe(words);
});

test("the numbers of a seed are the same for ever", () => {
  expect([0, 1, 2].map((position) => drawAt(0, position))).toEqual(KNOWN.zero);
  expect([0, 1, 2].map((position) => drawAt(-1, position))).toEqual(KNOWN.minusOne);
});

test("position 0 of seed 0 is made of the first published words", () => {
  expect(drawAt(0, 0)).toBe((0x6627e8d5 >>> 5) * 2 ** 26 + (0xe169c58d >>> 6));
});

test("positions beyond 32 bits go on in the counter's second word", () => {
  const [x = 0, y = 0] = philox([7, 1, 0, 0], [0, 0]);
  expect(drawAt(0, 2 ** 32 + 7)).toBe((x >>> 5) * 2 ** 26 + (y >>> 6));
});

test("seeds beyond 32 bits count whole, negative ones too", () => {
  const seeds = [1, 1 + 2 ** 32, -1, Number.MAX_SAFE_INTEGER, Number.MIN_SAFE_INTEGER, 2 ** 31, -(2 ** 31)];
  expect(new Set(seeds.map((seed) => drawAt(seed, 5))).size).toBe(seeds.length);
});

test("numbers are whole, below 2^53, and fill the range evenly", () => {
  const bins = new Float64Array(16);
  for (let position = 0; position < 16_000; position++) {
    const number = drawAt(99, position);
    expect(Number.isSafeInteger(number) && number >= 0).toBe(true);
    bins[Math.floor(number / 2 ** 49)]!++;
  }
  const statistic = bins.reduce((sum, seen) => sum + (seen - 1000) ** 2 / 1000, 0);
  expect(statistic).toBeLessThan(15 + 4 * Math.sqrt(30));
});

test("the choices of one call have seeds of their own, the first the call's", () => {
  const seeds = [0, 1, 2, 3].map((index) => seedOfChoice(1234, index));
  expect(seeds[0]).toBe(1234);
  expect(new Set(seeds).size).toBe(4);
  expect(seeds.every((seed) => Number.isSafeInteger(seed))).toBe(true);
});

test("a seed that nobody gave is another one each time", () => {
  expect(new Set(Array.from({ length: 100 }, randomSeed)).size).toBe(100);
});

const KNOWN = {
  zero: [3594291088041750, 8757170240931843, 175184825228490],
  minusOne: [4033622299712796, 914633169674112, 822753896494616],
};
