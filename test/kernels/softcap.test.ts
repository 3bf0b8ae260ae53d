import { afterAll, afterEach, beforeAll, expect, test } from "bun:test";
import { softcap as kernel, WORKGROUP } from "../../src/kernels/index.ts";
import { roundBf16 } from "../../src/kernels/reference/bf16.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { softcap } from "../../src/kernels/reference/softcap.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, Sampler, U } from "./support.ts";

describeOnDevices("a soft cap", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  const run = async (values: Matrix, cap: number): Promise<Matrix> => {
    const x = bench.input(values);
    await bench.run(
      kernel,
      { STRIDE: x.stride, CAP: cap, WORKGROUP },
      { x },
      {},
      {
        rows: values.length,
        columns: x.stride,
      },
    );
    return bench.read(x);
  };

  test.each([1, 30, 50])("of %d is cap · tanh(x / cap), rounded to bfloat16", async (cap) => {
    const sampler = new Sampler(cap);
    const x = [0.001, 0.1, 1, 3, 100].flatMap((deviation) => sampler.f32(3, 1001, deviation * cap));
    const actual = await run(x, cap);
    // Where the true value is that near to the middle between two bfloat16 values, either will do.
    const allowance = 64 * U;
    x.forEach((row, r) =>
      row.forEach((value, column) => {
        const y = softcap(value, cap);
        const allowed = [roundBf16(y * (1 - allowance)), roundBf16(y * (1 + allowance))];
        if (!allowed.includes(actual[r]![column]!)) expect({ value, is: actual[r]![column], allowed }).toBeUndefined();
      }),
    );
  });

  test("reaches the cap and never passes it, keeps zero, and lets NaN through", async () => {
    const [row] = await run([[1e30, -1e30, 3e38, 0, NaN, 599, 601]], 30);
    expect(Array.from(row!)).toEqual([30, -30, 30, 0, NaN, 30, 30]);
  });
});
