import { describe, expect, test } from "bun:test";
import {
  bf16ArrayToF32,
  bf16ToF32,
  convertToBf16,
  f32ArrayToBf16,
  f32ToBf16,
  indexOfNonFinite,
} from "../../src/quant/bf16.ts";
import { seededRandom } from "../support/safetensors.ts";

const PATTERNS = Uint16Array.from({ length: 65536 }, (_, pattern) => pattern);
const isNaNPattern = (bf16: number) => (bf16 & 0x7fff) > 0x7f80;
const fromBits = (bits: number) => new Float32Array(Uint32Array.of(bits).buffer)[0]!;

describe("a float32 is rounded to the nearest bfloat16, ties to even", () => {
  test.each([
    [0x3f800000, 0x3f80], // 1
    [0x80000000, 0x8000], // -0 stays -0
    [0x3f808000, 0x3f80], // a tie, down to the even
    [0x3f818000, 0x3f82], // a tie, up to the even
    [0x3f808001, 0x3f81], // just above a tie
    [0x3f807fff, 0x3f80], // just below
    [0x3fffffff, 0x4000], // the carry goes into the exponent
    [0x7f7fffff, 0x7f80], // the largest float32 becomes infinity
    [0xff7fffff, 0xff80],
    [0x7f800000, 0x7f80], // infinity
    [0x00000001, 0x0000], // the smallest subnormal
    [0x00018000, 0x0002], // a subnormal tie
    [0x807fffff, 0x8080], // the largest subnormal becomes normal
  ])("bits %p", (f32, bf16) => {
    expect(f32ToBf16(fromBits(f32))).toBe(bf16);
    expect(converted("F32", Uint8Array.from(new Uint8Array(Uint32Array.of(f32).buffer)))).toEqual([bf16]);
  });

  test("any NaN stays a quiet NaN of its sign", () => {
    const nans = [0x7f800001, 0x7fffffff, 0xff800001, 0xffffffff, 0x7fc00000];
    const result = converted("F32", new Uint8Array(Uint32Array.from(nans).buffer));
    expect(result).toEqual([0x7fc0, 0x7fff, 0xffc0, 0xffff, 0x7fc0]);
    expect(f32ToBf16(NaN) & 0x7fc0).toBe(0x7fc0);
  });

  test("a million random values agree with the exact distance to both neighbours", () => {
    const random = seededRandom(7);
    const bits = Uint32Array.from({ length: 1_000_000 }, () => random() * 2 ** 32);
    const result = f32ArrayToBf16(new Float32Array(bits.buffer));
    let wrong = 0;
    for (const [i, pattern] of bits.entries()) {
      if ((pattern & 0x7fffffff) >= 0x7f7f8000) continue; // NaN, infinity, and what rounds to it: by hand above
      const down = pattern >>> 16;
      const below = pattern & 0xffff; // its distance to `down`, in units of the last place
      const nearest = below < 0x8000 || (below === 0x8000 && down % 2 === 0) ? down : down + 1;
      if (result[i] !== nearest) wrong++;
    }
    expect(wrong).toBe(0);
  });
});

test("every bfloat16 survives the way to float32 and back", () => {
  const back = f32ArrayToBf16(bf16ArrayToF32(PATTERNS));
  for (const pattern of PATTERNS) {
    const expected = isNaNPattern(pattern) ? pattern | 0x40 : pattern;
    expect(back[pattern]).toBe(expected);
    if (!isNaNPattern(pattern)) expect(f32ToBf16(bf16ToF32(pattern))).toBe(pattern);
  }
});

test("a bfloat16 has the value its bits say", () => {
  expect([0x3f80, 0xc020, 0x0001, 0x7f80, 0x8000].map(bf16ToF32)).toEqual([1, -2.5, 2 ** -133, Infinity, -0]);
  expect(bf16ToF32(0x7fc0)).toBeNaN();
});

test("every half, subnormals too, becomes the bfloat16 nearest to its value", () => {
  const result = converted("F16", new Uint8Array(PATTERNS.buffer));
  const view = new DataView(PATTERNS.buffer);
  for (const pattern of PATTERNS) {
    const value = view.getFloat16(pattern * 2, true);
    if (Number.isNaN(value)) expect(isNaNPattern(result[pattern]!)).toBe(true);
    else {
      expect(Math.f16round(value)).toBe(value);
      expect(result[pattern]).toBe(f32ToBf16(value));
    }
  }
});

test("bytes at any alignment, in any number, convert alike", () => {
  const random = seededRandom(3);
  for (const dtype of ["F32", "F16", "BF16"] as const) {
    for (const count of [0, 1, 5, 16_384, 16_385, 40_000]) {
      const bytes = Uint8Array.from({ length: count * (dtype === "F32" ? 4 : 2) }, () => random() * 256);
      const aligned = converted(dtype, bytes);
      for (const shift of [1, 2, 3]) {
        const shifted = new Uint8Array(bytes.length + shift);
        shifted.set(bytes, shift);
        expect(converted(dtype, shifted.subarray(shift))).toEqual(aligned);
      }
    }
  }
});

test("values land at any place of a larger array, and nothing beside them is touched", () => {
  const values = Float32Array.of(1, -2.5, NaN, 3, 0.1, NaN, NaN);
  for (let start = 0; start < 4; start++) {
    for (let count = 0; count <= values.length; count++) {
      const all = new Uint16Array(12).fill(0xabcd);
      f32ArrayToBf16(values.subarray(0, count), all.subarray(start, start + count));
      const expected = Array.from(values.subarray(0, count), f32ToBf16);
      expect([...all]).toEqual(Array.from(all, (_, at) => expected[at - start] ?? 0xabcd));
    }
  }
});

test("bfloat16 is copied as it is", () => {
  expect(converted("BF16", Uint8Array.of(0x80, 0x3f, 0x01, 0x7f))).toEqual([0x3f80, 0x7f01]);
});

test("a target of another length is a mistake of the caller", () => {
  expect(() => convertToBf16("F32", new Uint8Array(8), new Uint16Array(3))).toThrow(
    "8 bytes of F32 are not 3 elements",
  );
});

test("the first value that is not finite is found", () => {
  expect(indexOfNonFinite(Uint16Array.of(0, 0x7f7f, 0xff7f))).toBe(-1);
  expect(indexOfNonFinite(Uint16Array.of(0, 0x7f80))).toBe(1);
  expect(indexOfNonFinite(Uint16Array.of(0xff80, 0x7fc0))).toBe(0);
  expect(indexOfNonFinite(new Uint16Array())).toBe(-1);
});

function converted(dtype: "F32" | "F16" | "BF16", bytes: Uint8Array): number[] {
  const target = new Uint16Array(bytes.length / (dtype === "F32" ? 4 : 2));
  convertToBf16(dtype, bytes, target);
  return [...target];
}
