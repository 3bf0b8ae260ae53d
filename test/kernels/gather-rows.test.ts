import { afterAll, afterEach, beforeAll, test } from "bun:test";
import { gatherRows as kernel, WORKGROUP } from "../../src/kernels/index.ts";
import { gatherRows } from "../../src/kernels/reference/gather-rows.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, range, Sampler } from "./support.ts";

describeOnDevices("gathering rows", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  test.each([1, 7, 33, 96, 129, 768])("of %d columns copies each, in any order and more than once", async (columns) => {
    const x = new Sampler(columns).f32(33, columns);
    for (const index of [[0], [32, 0, 32], range(0, 33).reverse(), range(0, 65).map((i) => (i * 7) % 33)]) {
      const bindings = {
        x: bench.input(x),
        index: bench.input([index], "u32"),
        y: bench.output(index.length, columns),
      };
      const { stride } = bindings.y;
      await bench.run(kernel, { STRIDE: stride, WORKGROUP }, bindings, {}, { rows: index.length, columns: stride });
      expectSame(await bench.read(bindings.y), gatherRows(x, index));
    }
  });
});
