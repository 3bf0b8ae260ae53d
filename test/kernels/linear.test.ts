import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import type { Device } from "../../src/gpu/device.ts";
import { strideOf, type Tensor } from "../../src/gpu/tensor.ts";
import {
  gemm,
  gemmLanes,
  gemv,
  GEMV_OUTPUTS,
  gemvLanes,
  type Sharing,
  SUBGROUP_LANES,
} from "../../src/kernels/index.ts";
import { linear, linearInOrder } from "../../src/kernels/reference/linear.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { absolute, Bench, expectSame, expectWithin, Sampler, U } from "./support.ts";

/** The kernels for GPUs, and those for CPUs in each way to share loads that a device can have. */
const kernelsOf = ({ info }: Device) => {
  const ways = (Object.keys(SUBGROUP_LANES) as Sharing[]).filter((way) => SUBGROUP_LANES[way] <= info.subgroupMinSize);
  return [gemv.bf16, gemm.bf16, ...ways.flatMap((way) => [gemvLanes[way].bf16, gemmLanes[way].bf16])];
};
type ProductKernel = typeof gemm.bf16 | typeof gemv.bf16;
const OUTPUTS = 65; // two tiles and one output more; 16 workgroups of gemv and one output more
const ROWS = [1, 3, 31, 33, 65]; // about one tile of 32 rows, and about two
const CASES = [
  { columns: 1, bias: true, round: true },
  { columns: 7, bias: false, round: false }, // shares its pipeline's stride with 1 and 8
  { columns: 8, bias: true, round: false },
  { columns: 33, bias: true, round: false }, // a block of 32 and a load of eight that is nearly empty
  { columns: 96, bias: true, round: true }, // whole blocks
  { columns: 100, bias: false, round: true },
  { columns: 129, bias: false, round: false },
  { columns: 768, bias: true, round: false }, // GPT-2's
  { columns: 1032, bias: true, round: true }, // more than 32 blocks: lanes of gemv take a second one
];

interface Case {
  columns: number;
  bias: boolean;
  round: boolean;
}

describeOnDevices("a linear layer", ({ open }) => {
  let bench: Bench;
  let KERNELS: readonly ProductKernel[];
  beforeAll(async () => {
    bench = new Bench(await open());
    KERNELS = kernelsOf(bench.device);
  });
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  describe.each(CASES)("with $columns columns, bias: $bias, rounding: $round:", ({ columns, bias, round }) => {
    const shape = { columns, bias, round };
    const sampler = new Sampler(columns);
    const weight = sampler.bf16(OUTPUTS, columns);
    const biasValues = bias ? sampler.bf16(1, OUTPUTS)[0] : undefined;

    test("is x Wᵀ + b by every kernel, whatever the number of rows", async () => {
      const run = await layer(bench, shape, [weight], biasValues);
      for (const rows of ROWS) {
        const x = sampler.f32(rows, columns);
        const expected = linear(x, weight, biasValues);
        const bound = boundOf(x, weight, biasValues, round);
        for (const kernel of KERNELS) expectWithin(await run(x, kernel), expected, bound);
      }
    }, 30_000);

    test("adds in the one order, so that a row's bits depend neither on the kernel nor on the other rows", async () => {
      const run = await layer(bench, shape, [weight], biasValues);
      const x = sampler.f32(65, columns);
      const byGemv = await run(x, gemv.bf16);
      for (const [first, end] of [
        [0, 65],
        [0, 33],
        [31, 65],
        [64, 65],
      ]) {
        for (const kernel of KERNELS) {
          expectSame(await run(x.slice(first, end), kernel), byGemv.slice(first, end));
        }
      }

      const exact = sampler.bf16(3, columns);
      const expected = linearInOrder(exact, weight, biasValues, round);
      for (const kernel of KERNELS) expectSame(await run(exact, kernel), expected);
    }, 30_000);

    test("gives the same bits when its weight lies in several parts", async () => {
      const whole = await layer(bench, shape, [weight], biasValues);
      const parts = [weight.slice(0, 1), weight.slice(1, 8), weight.slice(8, 41), weight.slice(41)];
      const split = await layer(bench, shape, parts, biasValues);
      const x = sampler.f32(33, columns);
      for (const kernel of KERNELS) expectSame(await split(x, kernel), await whole(x, kernel));
    }, 30_000);
  });

  test("leaves the columns of a part alone that another part makes", async () => {
    const sampler = new Sampler(1);
    const weight = sampler.bf16(5, 8);
    const shape = { columns: 8, bias: true, round: false };
    const run = await layer(bench, shape, [weight], sampler.bf16(1, OUTPUTS)[0], { firstOutput: 30 });
    for (const kernel of KERNELS) {
      for (const row of await run(sampler.f32(3, 8), kernel)) {
        const written = Array.from(row, (value, column) => (Number.isNaN(value) ? -1 : column)).filter((c) => c >= 0);
        expect(written).toEqual([30, 31, 32, 33, 34]);
      }
    }
  }, 30_000);

  test("puts its outputs behind those of other layers, where it shares their rows", async () => {
    const sampler = new Sampler(2);
    const shape = { columns: 33, bias: true, round: false };
    const [weight, bias] = [sampler.bf16(OUTPUTS, 33), sampler.bf16(1, OUTPUTS)[0]];
    const alone = await layer(bench, shape, [weight], bias);
    const behind = await layer(bench, shape, [weight.slice(0, 40), weight.slice(40)], bias, { outAt: 11 });
    const x = sampler.f32(9, 33);
    for (const kernel of KERNELS) {
      const rows = await behind(x, kernel);
      expectSame(
        rows.map((row) => Array.from(row).slice(11)),
        await alone(x, kernel),
      );
      for (const row of rows) expect(Array.from(row).slice(0, 11).every(Number.isNaN)).toBe(true);
    }
  }, 30_000);
});

/** A layer whose weight lies in `parts`, one after another from output `firstOutput` on. */
async function layer(
  bench: Bench,
  { columns, bias, round }: Case,
  parts: readonly Matrix[],
  biasValues: readonly number[] | undefined,
  { firstOutput = 0, outAt = 0 } = {},
) {
  const stride = strideOf(columns, "bf16");
  const constants = {
    WEIGHT_STRIDE: stride,
    COLUMNS: columns,
    STRIDE_OUT: strideOf(outAt + OUTPUTS, "f32"),
    OUT_AT: outAt,
    HAS_BIAS: bias ? 1 : 0,
    ROUND: round ? 1 : 0,
    OUTPUTS: GEMV_OUTPUTS,
    BLOCKS: Math.ceil(stride / 32),
  };
  const weights = parts.map((part) => ({ tensor: bench.input(part, "bf16"), outputs: part.length }));
  const biasTensor = bench.input([biasValues ?? [NaN]]);

  return async (values: Matrix, kernel: ProductKernel): Promise<Matrix> => {
    const rows = values.length;
    const x: Tensor = bench.input(values);
    const y = bench.output(rows, outAt + OUTPUTS);
    let first_output = firstOutput;
    for (const { tensor, outputs } of weights) {
      const bindings = { weight: tensor, scales: x, x, bias: biasTensor, y };
      const dims = { rows, outputs };
      const params = { rows, outputs, first_output }; // gemv and gemv_lanes leave `rows` alone
      await bench.run(kernel as typeof gemm.bf16, constants, bindings, params, dims);
      first_output += outputs;
    }
    return bench.read(y);
  };
}

/**
 * A product passes through one rounding of its own (where a device does not fuse it), the additions of its block, those
 * of the blocks and that of the bias, each of which is off by at most U of a sum that Σ|x w| + |b| bounds; 1% stands for
 * the squares of U. Rounding to bfloat16 then adds half a step, at most 2^-8 of the value.
 */
function boundOf(x: Matrix, weight: Matrix, bias: readonly number[] | undefined, round: boolean) {
  const additions = Math.min(x[0]!.length, 32) + Math.ceil(x[0]!.length / 32) + 1;
  const sums = linear(x, weight, bias);
  const magnitudes = linear(absolute(x), absolute(weight), bias?.map(Math.abs));
  return (row: number, column: number): number => {
    const sum = 1.01 * (additions + 1) * U * magnitudes[row]![column]!;
    return round ? sum + 2 ** -8 * (Math.abs(sums[row]![column]!) + sum) : sum;
  };
}
