import { expect, test } from "bun:test";
import { sum } from "../../src/base/bytes.ts";
import { isPadded, maskOf, pad, rectangleFromMask, rectangleOf, strip } from "../../src/protocol/rectangle.ts";
import { SEEDS, seeded } from "./seeded.ts";

test.each(SEEDS)("rows → rectangle → rows gives the rows back, and the mask says where they lie (seed %d)", (seed) => {
  const random = seeded(seed);
  const lengths = Array.from({ length: 1 + random(5) }, () => random(7));
  const width = 1 + random(5);
  const rectangle = rectangleOf(lengths);
  const rows = Uint16Array.from({ length: sum(lengths) * width }, () => 1 + random(65535));

  const padded = pad(rows, rectangle, width);
  expect(padded.length).toBe(lengths.length * rectangle.slots * width);
  expect(strip(padded, rectangle, width)).toEqual(rows);
  const mask = maskOf(rectangle);
  padded.forEach((value, index) => expect(value !== 0).toBe(mask[Math.floor(index / width)] === 1));
  if (rectangle.slots > 0) expect(rectangleFromMask(mask, rectangle.slots)).toEqual(rectangle);
});

test.each(SEEDS)("rectangle → rows → rectangle gives the rectangle back, with zeros for padding (seed %d)", (seed) => {
  const random = seeded(seed);
  const slots = 1 + random(6);
  const rectangle = { slots, lengths: Array.from({ length: 1 + random(5) }, () => random(slots + 1)) };
  const mask = maskOf(rectangle);
  const values = Int32Array.from({ length: mask.length }, () => random(1000));
  const zeroed = values.map((value, index) => value * mask[index]!);
  expect(pad(strip(values, rectangle, 1), rectangle, 1)).toEqual(zeroed);
});

test("a rectangle without padding is its own rows: nothing is copied", () => {
  const values = Uint16Array.of(1, 2, 3, 4);
  const rectangle = rectangleOf([2, 2]);
  expect(isPadded(rectangle)).toBe(false);
  expect(strip(values, rectangle, 1)).toBe(values);
  expect(pad(values, rectangle, 1)).toBe(values);
});
