import { expect, test } from "bun:test";
import { inDigits } from "../../src/base/digits.ts";

test.each([
  [0.0312, 2, "0.031"],
  [0.3, 2, "0.30"],
  [9.96, 2, "10"],
  [16.04, 2, "16"],
  [99.4, 2, "99"],
  [99.7, 2, "100"],
  [160.2, 2, "160"],
  [4_800_123.4, 3, "4800123"],
  [1.25e-7, 3, "1.25e-7"],
])("%p in %p digits is %p", (value, digits, text) => {
  expect(inDigits(value, digits)).toBe(text);
});
