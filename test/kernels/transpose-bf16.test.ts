import { afterAll, afterEach, beforeAll, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import { transposeBf16 as kernel, WORKGROUP } from "../../src/kernels/index.ts";
import { bitsOfBf16 } from "../../src/kernels/reference/bf16.ts";
import { transpose } from "../../src/kernels/reference/transpose-bf16.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, cacheRow, expectSame, Sampler } from "./support.ts";

const SHAPES = [
  { ins: 1, outs: 1 },
  { ins: 7, outs: 3 }, // a last word of one value, and rows of x that begin in the middle of a word but for their stride
  { ins: 8, outs: 65 },
  { ins: 33, outs: 96 },
  { ins: 100, outs: 129 },
];

describeOnDevices("a weight that is stored [in, out]", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  test.each(SHAPES)("becomes [out, in]: $ins × $outs, at once and piece by piece into parts", async ({ ins, outs }) => {
    const x = new Sampler(ins).bf16(ins, outs);
    const expected = transpose(x).map((row) => row.map(bitsOfBf16));
    const inStride = outs + (outs % 2);
    const constants = { IN_STRIDE: inStride, OUT_STRIDE: strideOf(ins, "bf16"), WORKGROUP };
    for (const { pieceIns, partOuts } of [
      { pieceIns: ins, partOuts: outs },
      { pieceIns: 8, partOuts: Math.ceil(outs / 3) }, // parts that begin in the middle of a word of x
      { pieceIns: 24, partOuts: 64 },
    ]) {
      const parts = [];
      for (let first = 0; first < outs; first += partOuts) {
        parts.push({ first, y: bench.output(Math.min(partOuts, outs - first), ins, "bf16") });
      }
      for (let first_in = 0; first_in < ins; first_in += pieceIns) {
        const piece = x.slice(first_in, first_in + pieceIns);
        const padded = bench.input(
          piece.map((row) => cacheRow([row])),
          "u32",
        );
        for (const { first, y } of parts) {
          const params = { ins: piece.length, first_in, first_out: first, outs: Math.min(partOuts, outs - first) };
          await bench.run(kernel, constants, { x: padded, y }, params, params);
        }
      }
      for (const { first, y } of parts) expectSame(await bench.read(y), expected.slice(first, first + partOuts));
    }
  });
});
