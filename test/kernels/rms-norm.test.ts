import { afterAll, afterEach, beforeAll, describe, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import { headNorm as headKernels, rmsNorm as kernels } from "../../src/kernels/index.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { type HeadColumns, headNorm, rmsNorm } from "../../src/kernels/reference/rms-norm.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, expectWithin, Sampler, SMALLEST_NORMAL, U } from "./support.ts";

const EPS = 1e-6;
const WORKGROUP = 128;
const HEAD_WORKGROUP = 64;
const COLUMNS = [1, 7, 8, 33, 96, 100, 129, 768]; // fewer than lanes, one more, and several for each
/** Llama multiplies by weight, Gemma by 1 + weight. */
const OFFSETS = [0, 1];

describeOnDevices("RMS norm", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  describe.each(["subgroups", "workgroup"] as const)("that reduces by %s", (variant) => {
    const run = async (x: Matrix, weight: number[], offset: number, eps = EPS): Promise<Matrix> => {
      if (variant === "subgroups" && !bench.device.hasSubgroups) throw new Error("this device lacks subgroups");
      const columns = x[0]!.length;
      const y = bench.output(x.length, columns);
      const constants = { COLUMNS: columns, STRIDE: y.stride, EPS: eps, OFFSET: offset, WORKGROUP };
      const bindings = { x: bench.input(x), weight: bench.input([weight]), y };
      await bench.run(kernels[variant], constants, bindings, {}, { rows: x.length });
      return bench.read(y);
    };

    test.each(COLUMNS)("normalises rows of %d columns, and no row's bits depend on the others", async (columns) => {
      const sampler = new Sampler(columns);
      const weight = sampler.bf16(1, columns)[0]!;
      const x = sampler.f32(65, columns).map((row, i) => row.map((value) => Math.fround(value * 10 ** ((i % 5) - 2))));
      for (const offset of OFFSETS) {
        const all = await run(x, weight, offset);
        const expected = rmsNorm(x, weight, EPS, offset);
        expectWithin(all, expected, boundOf(expected, columns, WORKGROUP));
        for (const rows of [1, 31]) expectSame(await run(x.slice(65 - rows), weight, offset), all.slice(65 - rows));
      }
    });

    test("ignores a row's scale without eps, and is zero for zeros with it", async () => {
      const sampler = new Sampler(1);
      const weight = sampler.bf16(1, 96)[0]!;
      const x = sampler.f32(3, 96);
      const scaled = x.map((row) => row.map((value) => value * 1024));
      expectSame(await run(scaled, weight, 0, 0), await run(x, weight, 0, 0));
      const zeros = x.map((row) => row.map(() => 0));
      expectWithin(await run(zeros, weight, 1), zeros, () => 0);
    });

    describe.each([
      { first: 0, heads: 3, headStride: 15, headDim: 15 },
      { first: 45, heads: 2, headStride: 15, headDim: 15 }, // the keys behind three queries
      { first: 64, heads: 2, headStride: 200, headDim: 64 }, // heads that lie apart
      { first: 3, heads: 1, headStride: 256, headDim: 256 }, // more dimensions than lanes
    ] satisfies HeadColumns[])("over $heads heads of $headDim", (heads) => {
      test("norms each of them by itself, and nothing between", async () => {
        const sampler = new Sampler(heads.first + heads.headDim);
        const columns = heads.first + heads.heads * heads.headStride + 5;
        const x = sampler.f32(9, columns, 3);
        const weight = sampler.bf16(1, heads.headDim)[0]!;
        for (const offset of OFFSETS) {
          const actual = await runHeads(x, weight, offset, heads);
          const expected = headNorm(x, weight, EPS, offset, heads);
          const bound = boundOf(expected, heads.headDim, HEAD_WORKGROUP);
          expectWithin(actual, expected, (row, column) => (isInHead(column, heads) ? bound(row, column) : 0));
          expectSame(await runHeads(x.slice(4, 5), weight, offset, heads), actual.slice(4, 5));
        }
      });
    });

    const runHeads = async (x: Matrix, weight: number[], offset: number, heads: HeadColumns): Promise<Matrix> => {
      const tensor = bench.input(x);
      const constants = {
        HEAD_DIM: heads.headDim,
        HEAD_STRIDE: heads.headStride,
        FIRST: heads.first,
        STRIDE: strideOf(x[0]!.length, "f32"),
        EPS,
        OFFSET: offset,
        WORKGROUP: HEAD_WORKGROUP,
      };
      const dims = { rows: x.length, heads: heads.heads };
      await bench.run(headKernels[variant], constants, { weight: bench.input([weight]), x: tensor }, {}, dims);
      return bench.read(tensor);
    };
  });
});

const isInHead = (column: number, { first, heads, headStride, headDim }: HeadColumns): boolean =>
  column >= first && column < first + heads * headStride && (column - first) % headStride < headDim;

/**
 * However the lanes are reduced, a square passes through n = columns / lanes + lanes - 1 additions at most, each off by
 * U, as is the square. The root halves that; sqrt and both divisions add 12 U, the two products and weight + OFFSET 3 U.
 */
function boundOf(expected: Matrix, columns: number, lanes: number) {
  const additions = Math.ceil(columns / lanes) + lanes - 1;
  const relative = 1.01 * ((additions + 3) / 2 + 12 + 3) * U;
  return (row: number, column: number): number => relative * Math.abs(expected[row]![column]!) + SMALLEST_NORMAL;
}
