import { expect, test } from "bun:test";
import { quote } from "../../src/base/quote.ts";

const nested = (depth: number): unknown => JSON.parse("[".repeat(depth) + "]".repeat(depth));

test.each([
  ["a", '"a"'],
  ['say "no"\n', '"say \\"no\\"\\n"'],
  [1.5, "1.5"],
  [null, "null"],
  [undefined, "missing"],
  [[1, "x", [true]], '[1,"x",[true]]'],
  [{ a: { b: [] } }, '{"a":{"b":[]}}'],
  [NaN, "NaN"],
  [[Infinity], "[Infinity]"],
])("a value is quoted as JSON, where that has a word for it: %p", (value, quoted) => {
  expect(quote(value)).toBe(quoted);
});

test("a whole number that a float64 has rounded is not passed off as what was written", () => {
  expect(quote(JSON.parse("9223372036854775808"))).toBe("about 9.223e+18");
  expect(quote(Number.MAX_SAFE_INTEGER)).toBe("9007199254740991");
});

test.each([
  ["deep", nested(100_000)],
  ["long", "x".repeat(1 << 24)],
  ["full of items", Array.from({ length: 1 << 20 }, (_, i) => i)],
  ["full of fields", Object.fromEntries(Array.from({ length: 1 << 16 }, (_, i) => [`field ${i}`, i]))],
  ["wide at each depth", [[["y".repeat(1000), nested(9)], "z".repeat(1000)], "w".repeat(1000)]],
])("a value that is %s is quoted in few characters, and soon", (_, value) => {
  const began = performance.now();
  expect(quote(value).length).toBeLessThanOrEqual(81);
  expect(performance.now() - began).toBeLessThan(200);
});
