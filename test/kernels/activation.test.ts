import { afterAll, afterEach, beforeAll, expect, test } from "bun:test";
import {
  ACTIVATIONS,
  type Activation,
  activation as kernel,
  gatedActivation,
  WORKGROUP,
} from "../../src/kernels/index.ts";
import { activation } from "../../src/kernels/reference/activation.ts";
import { bf16OfBits } from "../../src/kernels/reference/bf16.ts";
import { type Matrix, matrixOf } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectWithin, range, Sampler, SMALLEST_NORMAL, U } from "./support.ts";

const NAMES = Object.keys(ACTIVATIONS) as Activation[];
const COLUMNS = 255; // a row ends with one column of padding

/** Every finite bfloat16 value: subnormals, the far tails up to ±3.4e38, and both zeros. [256, 255] */
const EVERY_BF16 = matrixOf(256, COLUMNS, (exponentAndSign, i) => {
  const finite = exponentAndSign * COLUMNS + i;
  return bf16OfBits(finite < 0x7f80 ? finite : finite - 0x7f80 + 0x8000);
});

/** Values where the functions bend, with all 24 bits in use. */
const DENSE = new Sampler(1).f32(64, COLUMNS, 4);

describeOnDevices("an activation", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  const run = async (name: Activation, values: Matrix): Promise<Matrix> => {
    const x = bench.input(values);
    const constants = { STRIDE: x.stride, ACTIVATION: ACTIVATIONS[name], WORKGROUP };
    await bench.run(kernel, constants, { x }, {}, { rows: values.length, columns: x.stride });
    return bench.read(x);
  };

  test.each(NAMES)(
    "%s is right for every finite bfloat16 and between, out to the far tails",
    async (name) => {
      for (const values of [EVERY_BF16, DENSE]) {
        const expected = values.map((row) => Array.from(row, (x) => activation(name, x)));
        const bound = (row: number, column: number): number => {
          const x = values[row]![column]!;
          return (
            relativeBound(name, x) * Math.abs(expected[row]![column]!) + SMALLEST_NORMAL * Math.max(1, Math.abs(x))
          );
        };
        expectWithin(await run(name, values), expected, bound);
      }
    },
    15_000,
  );

  test.each(["gelu_tanh", "gelu_erf", "quick_gelu", "silu"] as const)(
    "%s keeps f(x) - f(-x) = x, for the two sides share one tail",
    async (name) => {
      const right = await run(name, DENSE);
      const left = await run(
        name,
        DENSE.map((row) => row.map((x) => -x)),
      );
      const difference = right.map((row, i) => Array.from(row, (value, j) => value - left[i]![j]!));
      // Both divisions are off by 5 U of their value, which |x| bounds, and so are three other roundings by U.
      expectWithin(difference, DENSE, (row, column) => 2 * (5 + 3) * U * Math.abs(DENSE[row]![column]!));
    },
  );

  test("is the identity far to the right and zero far to the left", async () => {
    const far = [100, 1e4, 1e30, 3e38];
    for (const name of NAMES) {
      const [right, left] = await run(name, [far, far.map((x) => -x)]);
      expect(Array.from(right!)).toEqual(far.map(Math.fround));
      for (const value of Array.from(left!)) expect(Math.abs(value)).toBe(0);
    }
  });

  test.each(NAMES)("%s of a gate times what it gates, from one row into another", async (name) => {
    const ups = new Sampler(2).f32(DENSE.length, COLUMNS, 2);
    const x = bench.input(DENSE.map((row, i) => [...row, ...ups[i]!]));
    const y = bench.output(DENSE.length, COLUMNS);
    const constants = {
      COLUMNS,
      STRIDE: x.stride,
      STRIDE_OUT: y.stride,
      ACTIVATION: ACTIVATIONS[name],
      WORKGROUP,
    };
    await bench.run(gatedActivation, constants, { x, y }, {}, { rows: DENSE.length, columns: COLUMNS });
    const expected = DENSE.map((row, i) => row.map((gate, column) => activation(name, gate) * ups[i]![column]!));
    expectWithin(await bench.read(y), expected, (row, column) => {
      const [gate, up] = [DENSE[row]![column]!, ups[row]![column]!];
      const flushed = SMALLEST_NORMAL * Math.max(1, Math.abs(gate)) * Math.max(1, Math.abs(up));
      return (relativeBound(name, gate) + 1.01 * U) * Math.abs(expected[row]![column]!) + flushed;
    });
  });

  test("treats each row of a larger matrix, and no value of another", async () => {
    const expected = await run("silu", EVERY_BF16.slice(100, 101));
    for (const rows of [3, 33]) {
      const all = await run(
        "silu",
        range(100, 100 + rows).map((row) => EVERY_BF16[row]!),
      );
      expect(all[0]!).toEqual(expected[0]!);
    }
  });
});

/**
 * The relative error that WGSL's promises allow. x sigmoid(a): exp(-|a|) is off by 3 + 2|a| units in the last place, or
 * (6 + 4|a|) U, and by the error of a; the sum, the division (5 U), and the product by x add 7 U.
 */
function relativeBound(name: Activation, x: number): number {
  const sigmoid = (a: number, roundingsOfA: number) => (13 + (4 + roundingsOfA) * Math.abs(a)) * U;
  switch (name) {
    case "gelu_tanh": // a: three constants and six operations of positive factors and terms
      return 1.01 * sigmoid(2 * Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3), 9);
    case "quick_gelu":
      return 1.01 * sigmoid(1.702 * x, 2);
    case "silu":
      return 1.01 * sigmoid(x, 0);
    case "gelu_erf": {
      // t exp(p - z²): the fit (2 U), t (8 U), z² (5 U z²), the difference and exp (5 U of |p - z²| <= z² + 1.3, and 6 U);
      // p: its coefficients' sizes add up to 7, Horner's partial results to 4, twice (product, sum), and t's error
      // comes in through each (4 · 8 U). Then 2 - tail, and two products.
      const z2 = (x * x) / 2;
      return 1.01 * (2 + 8 + 6 + 5 * 1.3 + 7 + 8 + 32 + 3 + 10 * z2) * U;
    }
    case "relu":
      return 0;
  }
}
