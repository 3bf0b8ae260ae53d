import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { LATENT_TESTS } from "../../src/engine/self-test/latent.ts";
import { strideOf } from "../../src/gpu/tensor.ts";
import { absorbQuery as absorbKernel, expandValue as expandKernel } from "../../src/kernels/index.ts";
import { absorbQuery, expandValue, type LatentShape } from "../../src/kernels/reference/latent.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, Sampler } from "./support.ts";

const CASES: (LatentShape & { latent: number })[] = [
  { heads: 1, plain: 1, turned: 1, value: 1, latent: 1 },
  { heads: 3, plain: 5, turned: 4, value: 7, latent: 21 },
  { heads: 2, plain: 128, turned: 64, value: 128, latent: 512 }, // DeepSeek-V3's
  { heads: 2, plain: 9, turned: 100, value: 70, latent: 531 }, // more columns, and more values, than lanes
];

describeOnDevices("latents", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  test.each(LATENT_TESTS.map((one) => [one.name, one] as const))(
    "pass the self-test of %s",
    async (_, one) => expect(await one.run(bench)).toBeUndefined(),
    30_000,
  );

  describe.each(CASES)("of $latent columns for $heads heads", ({ latent, ...shape }) => {
    const { heads, plain, turned, value } = shape;
    const sampler = new Sampler(latent);
    const weight = sampler.bf16(heads * (plain + value), latent);
    const sizes = { PLAIN: plain, TURNED: turned, VALUE: value, LATENT: latent };
    const constants = { ...sizes, WEIGHT_STRIDE: strideOf(latent, "bf16"), COLUMNS: latent };
    const [narrow, wide] = [heads * (plain + turned), heads * (latent + turned)];

    /** `cuts`: the heads at which the weight is cut into tensors. */
    const run = async (kernel: "absorb" | "expand", x: Matrix, cuts = [0, heads]): Promise<Matrix> => {
      const y = bench.output(x.length, kernel === "absorb" ? wide : heads * value);
      const input = bench.input(x);
      const strides = { STRIDE: input.stride, STRIDE_OUT: y.stride };
      for (const [index, end] of cuts.slice(1).entries()) {
        const first = cuts[index]!;
        const part = bench.input(weight.slice(first * (plain + value), end * (plain + value)), "bf16");
        const operands = { weight: part, scales: input, y };
        const params = { rows: x.length, first_head: first };
        const dims = { rows: x.length, heads: end - first, latent, value };
        if (kernel === "absorb") {
          await bench.run(absorbKernel.bf16, { ...constants, ...strides }, { ...operands, q: input }, params, dims);
        } else {
          await bench.run(expandKernel.bf16, { ...constants, ...strides }, { ...operands, x: input }, params, dims);
        }
      }
      return bench.read(y);
    };

    test("meet queries and become values in one order of addition", async () => {
      const [q, x] = [sampler.bf16(5, narrow), sampler.bf16(5, wide)];
      expectSame(await run("absorb", q), absorbQuery(q, weight, shape));
      expectSame(await run("expand", x), expandValue(x, weight, shape));
    }, 30_000);

    test("give a row the same bits whatever other rows there are, and however the weight lies in tensors", async () => {
      const [q, x] = [sampler.f32(9, narrow), sampler.f32(9, wide)];
      const [absorbed, expanded] = [await run("absorb", q), await run("expand", x)];
      expectSame(await run("absorb", q.slice(6, 8)), absorbed.slice(6, 8));
      expectSame(await run("expand", x.slice(6, 8)), expanded.slice(6, 8));
      if (heads === 1) return;
      expectSame(await run("absorb", q, [0, 1, heads]), absorbed);
      expectSame(await run("expand", x, [0, 1, heads]), expanded);
    }, 30_000);
  });
});
