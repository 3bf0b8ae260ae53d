import { afterAll, afterEach, beforeAll, expect, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import { kvWrite as kernel, WORKGROUP } from "../../src/kernels/index.ts";
import { type HeadShape, kvWrite } from "../../src/kernels/reference/kv-write.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, cacheRow, isUnwritten, range, Sampler } from "./support.ts";

const SHAPES: (HeadShape & { headStride?: number })[] = [
  { heads: 3, kvHeads: 1, headDim: 15 },
  { heads: 5, kvHeads: 5, headDim: 15 }, // an odd head in an odd place
  { heads: 5, kvHeads: 5, headDim: 20 },
  { heads: 6, kvHeads: 2, headDim: 24 },
  { heads: 3, kvHeads: 3, headDim: 64 },
  { heads: 1, kvHeads: 1, headDim: 128 },
  { heads: 3, kvHeads: 3, headDim: 15, headStride: 45 }, // head by head query, key and value
];
const SLOTS = 70;

describeOnDevices("the cache", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  test.each(SHAPES)(
    "takes $kvHeads heads of $headDim dimensions in bfloat16 at the tokens' slots, and keeps the rest",
    async (shape) => {
      const { heads, kvHeads, headDim, headStride = headDim } = shape;
      const columns = (heads + 2 * kvHeads) * headDim;
      const words = kvHeads * Math.ceil(headDim / 2);
      const constants = {
        STRIDE: strideOf(columns, "f32"),
        KV_HEADS: kvHeads,
        HEAD_DIM: headDim,
        HEAD_STRIDE: headStride,
        KEYS_AT: headStride === headDim ? heads * headDim : headDim,
        VALUES_AT: headStride === headDim ? (heads + kvHeads) * headDim : 2 * headDim,
        WORKGROUP,
      };
      for (const tokens of [1, 3, 31, 65]) {
        const qkv = new Sampler(tokens * 1000 + columns).f32(tokens, columns);
        const slots = qkv.map((_, token) => (token * 37 + 11) % SLOTS); // scattered: 37 and 70 share no factor
        const [keys, values] = [bench.output(SLOTS, words, "u32"), bench.output(SLOTS, words, "u32")];
        const bindings = { qkv: bench.input(qkv), slots: bench.input([slots], "u32"), keys, values };
        await bench.run(kernel, constants, bindings, {}, { rows: tokens, columns: words });

        const sideBySide = (row: number[]) =>
          [0, 1, 2].flatMap((which) =>
            range(0, heads).flatMap((head) => {
              const first = head * headStride + which * headDim;
              return row.slice(first, first + headDim);
            }),
          );
        const expected = kvWrite(headStride === headDim ? qkv : qkv.map(sideBySide), shape);
        for (const [tensor, heads] of [
          [keys, expected.keys],
          [values, expected.values],
        ] as const) {
          for (const [slot, row] of (await bench.read(tensor)).entries()) {
            const token = slots.indexOf(slot);
            if (token >= 0) expect(Array.from(row)).toEqual(cacheRow(heads[token]!));
            else expect(Array.from(row).every(isUnwritten)).toBe(true);
          }
        }
      }
    },
  );
});
