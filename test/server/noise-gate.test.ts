import { expect, test } from "bun:test";
import { NoiseGate } from "../../src/server/verify/noise-gate.ts";
import { seededRandom } from "../support/safetensors.ts";

const [TOKENS, WIDTH] = [24, 64];
const random = seededRandom(1);
/** Between -1 and 1, [tokens, width]. */
const noise = () => Float32Array.from({ length: TOKENS * WIDTH }, () => 2 * random() - 1);

const float32 = noise();
const off = (by: number, errors = noise(), from = float32) => from.map((value, i) => value + by * errors[i]!);
const expected = { float32, bfloat16: off(0.01) };

function judge(values: Float32Array, runs = expected) {
  const gate = new NoiseGate("layer 0");
  gate.add("only", TOKENS, values, runs);
  return gate.report;
}

test("values with the noise of bfloat16, and with less, are within", () => {
  expect(judge(off(0.01))).toMatchObject({ name: "layer 0", prompt: "only", isWithin: true });
  expect(judge(off(0.01)).toFloat32).toBeCloseTo(1, 1);
  expect(judge(off(0.01)).toBfloat16).toBeCloseTo(Math.SQRT2, 1);
  expect(judge(expected.bfloat16)).toMatchObject({ toFloat32: 1, toBfloat16: 0, isWithin: true });
  expect(judge(float32)).toMatchObject({ toFloat32: 0, toBfloat16: 1, maxError: 0, isWithin: true });
});

test("1.6 times the noise is outside, and so is an error in one token of all", () => {
  expect(judge(off(0.016))).toMatchObject({ isWithin: false });
  const oneToken = off(0.01).fill(0, 5 * WIDTH, 6 * WIDTH);
  expect(judge(oneToken)).toMatchObject({ isWithin: false });
});

test("the rounding of a single value that is thousands of times as large as all others does not decide", () => {
  const massive = (values: Float32Array, error: number) => values.with(3, 20_000 + error);
  const runs = { float32: massive(float32, 0), bfloat16: massive(expected.bfloat16, 8) };
  const report = judge(massive(off(0.006), 60), runs);
  expect(report).toMatchObject({ maxError: 60, maxNoise: 8, isWithin: true });
  expect(report.toFloat32).toBeLessThan(1);
});

test("the prompt that is furthest off is named, and the others do not hide it", () => {
  const gate = new NoiseGate("logits");
  for (const prompt of ["a", "b", "c"]) {
    gate.add(prompt, TOKENS, off(prompt === "b" ? 0.05 : 0.005), { float32, bfloat16: off(0.01) });
  }
  expect(gate.report).toMatchObject({ prompt: "b", isWithin: false });
});
