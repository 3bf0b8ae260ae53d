import { afterAll, afterEach, beforeAll, describe, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import { layerNorm as kernels } from "../../src/kernels/index.ts";
import { average, layerNorm } from "../../src/kernels/reference/layer-norm.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, expectWithin, range, Sampler, U } from "./support.ts";

const EPS = 1e-5;
const WORKGROUP = 128;
const COLUMNS = [1, 7, 8, 33, 96, 100, 129, 768]; // fewer than lanes, one more, and several for each
const ROWS = [1, 3, 31, 65];

describeOnDevices("layer norm", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  describe.each(["subgroups", "workgroup"] as const)("that reduces by %s", (variant) => {
    const run = async (x: Matrix, { weight, bias }: Affine, eps = EPS): Promise<Matrix> => {
      if (variant === "subgroups" && !bench.device.hasSubgroups) throw new Error("this device lacks subgroups");
      const columns = x[0]!.length;
      const y = bench.output(x.length, columns);
      const bindings = { x: bench.input(x), weight: bench.input([weight]), bias: bench.input([bias]), y };
      const constants = { COLUMNS: columns, STRIDE: strideOf(columns, "f32"), EPS: eps, WORKGROUP };
      await bench.run(kernels[variant], constants, bindings, {}, { rows: x.length });
      return bench.read(y);
    };

    test.each(COLUMNS)("normalises rows of %d columns, and no row's bits depend on the others", async (columns) => {
      const sampler = new Sampler(columns);
      const affine = affineOf(sampler, columns);
      const x = sampler.f32(65, columns).map((row, i) => row.map((value) => Math.fround(value + (i % 5) * 3)));
      const all = await run(x, affine);
      expectWithin(all, layerNorm(x, affine.weight, affine.bias, EPS), boundOf(x, affine, EPS));
      for (const rows of ROWS) expectSame(await run(x.slice(65 - rows), affine), all.slice(65 - rows));
    });

    test("keeps its digits where the mean is far larger than the deviation", async () => {
      const sampler = new Sampler(1);
      const affine = affineOf(sampler, 96);
      const x = sampler.f32(4, 96).map((row, i) => row.map((value) => Math.fround(value + 10 ** i)));
      expectWithin(await run(x, affine), layerNorm(x, affine.weight, affine.bias, EPS), boundOf(x, affine, EPS));
    });

    test("does not change when a row is shifted", async () => {
      const sampler = new Sampler(2);
      const affine = affineOf(sampler, 96);
      const x = range(0, 3).map(() => range(0, 96).map(() => sampler.integer(2048) / 256));
      const shifted = x.map((row) => row.map((value) => value + 64)); // exact: both have the same true result
      const [here, there] = [boundOf(x, affine, EPS), boundOf(shifted, affine, EPS)];
      const [before, after] = [await run(x, affine), await run(shifted, affine)];
      expectWithin(after, before, (row, column) => here(row, column) + there(row, column));
    });

    test("changes with a row's scale by what eps does, and not at all without eps", async () => {
      const sampler = new Sampler(3);
      const affine = affineOf(sampler, 96);
      const x = sampler.f32(3, 96);
      const scaled = x.map((row) => row.map((value) => value * 1024));
      expectSame(await run(scaled, affine, 0), await run(x, affine, 0));
      // 1/√(v + eps) is 1/√v less than eps/2v of it.
      const [here, there] = [boundOf(x, affine, EPS), boundOf(scaled, affine, EPS)];
      const expected = await run(x, affine);
      const byEps = x.map((row) => EPS / (2 * varianceOf(row)));
      expectWithin(await run(scaled, affine), expected, (row, column) => {
        const normalised = Math.abs(expected[row]![column]! - affine.bias[column]!);
        return here(row, column) + there(row, column) + 1.01 * byEps[row]! * normalised;
      });
    });

    test("gives the bias for a row of equal values", async () => {
      const affine = affineOf(new Sampler(4), 96);
      const x = [0, 1, -3.5, 1000].map((value) => range(0, 96).map(() => value)); // sums that float32 holds
      expectSame(
        await run(x, affine),
        x.map(() => affine.bias),
      );
    });
  });
});

interface Affine {
  weight: number[];
  bias: number[];
}

const affineOf = (sampler: Sampler, columns: number): Affine => ({
  weight: sampler.bf16(1, columns)[0]!,
  bias: sampler.bf16(1, columns)[0]!,
});

const varianceOf = (row: readonly number[]): number => {
  const mean = average(row);
  return average(row.map((value) => (value - mean) ** 2));
};

/**
 * However the lanes are reduced, a value passes through n = columns / lanes + lanes - 1 additions at most, each off by U.
 * The mean is off by m = (n + 5) U average|x|, its division by 5 U. A difference d = x - mean is off by m + U |d|; the
 * sum of its squares by (n + 3) U, and by m² per value, as any sum about another centre than the mean; sqrt and both
 * divisions by 12 U more.
 */
function boundOf(x: Matrix, { weight, bias }: Affine, eps: number) {
  const rows = x.map((values) => {
    const row = Array.from(values);
    const additions = Math.ceil(row.length / WORKGROUP) + WORKGROUP - 1;
    const mean = average(row);
    const meanError = (additions + 5) * U * average(row.map(Math.abs));
    const scale = 1 / Math.sqrt(varianceOf(row) + eps);
    const scaleError = ((additions + 3) / 2 + 12) * U + (meanError * scale) ** 2 / 2;
    return { row, mean, meanError, scale, scaleError };
  });
  return (row: number, column: number): number => {
    const { row: values, mean, meanError, scale, scaleError } = rows[row]!;
    const difference = Math.abs(values[column]! - mean);
    const normalisedError = scale * (meanError + difference * (scaleError + 2 * U));
    const product = Math.abs(weight[column]!) * (normalisedError + U * scale * difference);
    const sum = Math.abs(weight[column]!) * scale * difference + Math.abs(bias[column]!);
    return 1.01 * (product + U * sum);
  };
}
