import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import {
  absmax,
  dequantize,
  type Encoding,
  gemm,
  gemv,
  GEMV_OUTPUTS,
  quantizeInt8 as int8Kernel,
  quantizeNf4 as nf4Kernel,
  WORKGROUP,
} from "../../src/kernels/index.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { dequantizeInt8, dequantizeNf4, quantizeInt8, quantizeNf4 } from "../../src/kernels/reference/quantize.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, Sampler } from "./support.ts";

/** `multiplied`: also by gemv and gemm, whose pipelines take long to compile. */
const SHAPES = [
  { rows: 1, columns: 1 },
  { rows: 5, columns: 7, multiplied: true }, // one block holds several rows
  { rows: 33, columns: 20 },
  { rows: 9, columns: 64 },
  { rows: 13, columns: 75, multiplied: true }, // blocks begin and end anywhere
  { rows: 17, columns: 100 },
  { rows: 3, columns: 129, multiplied: true },
  { rows: 8, columns: 200 },
  { rows: 65, columns: 96, multiplied: true },
  { rows: 4, columns: 768 },
];

describeOnDevices("a weight", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  /** Rows that are hard: zeros, one that is nearly zero, large ones, ties. */
  function weightOf(rows: number, columns: number): Matrix {
    const weight = new Sampler(rows * 1000 + columns).bf16(rows, columns, 0.05).map((row) => Array.from(row));
    if (rows > 2) weight[1] = weight[1]!.map(() => 0);
    if (rows > 3) weight[2] = weight[2]!.map((value) => value * 2 ** -20); // subnormal as float16
    if (rows > 4) weight[3] = weight[3]!.map((_, column) => ((column % 17) - 8) * 2 ** 6 * 0.5);
    return weight;
  }

  const scalesOf = async (weight: Matrix, block: number) => {
    const [rows, columns] = [weight.length, weight[0]!.length];
    const blocks = Math.ceil((rows * columns) / block);
    const x = bench.input(weight, "bf16");
    const y = bench.output(1, blocks);
    const constants = { COLUMNS: columns, X_STRIDE: strideOf(columns, "bf16"), BLOCK: block, WORKGROUP };
    await bench.run(absmax, constants, { x, absmax: y }, { values: rows * columns }, { blocks });
    return { x, scales: y };
  };

  describe.each(SHAPES)("of $rows × $columns", ({ rows, columns, multiplied }) => {
    const weight = weightOf(rows, columns);
    const stride = strideOf(columns, "bf16");

    test("becomes the NF4 codes of bitsandbytes", async () => {
      const expected = quantizeNf4(weight);
      const { x, scales } = await scalesOf(weight, 64);
      expectSame(await bench.read(scales), [expected.absmax]);
      const codes = bench.output(rows, stride / 8, "u32");
      const dims = { rows, columns: stride };
      await bench.run(
        nf4Kernel,
        { COLUMNS: columns, X_STRIDE: stride, WORKGROUP },
        { x, absmax: scales, codes },
        { rows },
        dims,
      );
      expect(unpack(await bench.read(codes), 4, columns)).toEqual(expected.codes);
    });

    test("becomes the INT8 codes of bitsandbytes", async () => {
      const expected = quantizeInt8(weight);
      const { x, scales } = await scalesOf(weight, columns);
      const largest = [...(await bench.read(scales))[0]!].map((value) => new Float16Array([value])[0]!);
      expect(largest).toEqual(expected.scb);
      const scale = bench.input([
        largest.map((value) => (value === 0 ? 0 : Math.fround(Math.fround(1 / value) * 127))),
      ]);
      const codes = bench.output(rows, stride / 4, "u32");
      await bench.run(
        int8Kernel,
        { X_STRIDE: stride, WORKGROUP },
        { x, scale, codes },
        { rows },
        { rows, columns: stride },
      );
      expect(unpack(await bench.read(codes), 8, columns).map((row) => row.map((code) => (code << 24) >> 24))).toEqual(
        expected.codes,
      );
    });

    if (!multiplied) return;
    test.each(["nf4", "int8"] as const)(
      "is multiplied packed (%s) as if it were dequantized, to the bit",
      async (encoding) => {
        const { codes, scales, values } = encoded(weight, encoding);
        const packed = { weight: bench.input(codes, "u32"), scales: bench.input([scales]) };
        const plain = { weight: bench.input(values, "bf16"), scales: packed.scales };
        const shape = { WEIGHT_STRIDE: stride, COLUMNS: columns };

        const dequantized = bench.output(rows, columns);
        const dims = { rows, columns: stride };
        await bench.run(dequantize[encoding], { ...shape, WORKGROUP }, { ...packed, y: dequantized }, { rows }, dims);
        expectSame(await bench.read(dequantized), values);

        const constants = { ...shape, STRIDE_OUT: strideOf(rows, "f32"), OUT_AT: 0, HAS_BIAS: 0, ROUND: 0 };
        const x = bench.input(new Sampler(7).f32(9, columns));
        const blocks = { OUTPUTS: GEMV_OUTPUTS, BLOCKS: Math.ceil(stride / 32) };
        const products = async (kind: Encoding, operands: typeof packed) => {
          const byGemv = bench.output(9, rows);
          const byGemm = bench.output(9, rows);
          const params = { rows: 9, outputs: rows, first_output: 0 };
          await bench.run(gemv[kind], { ...constants, ...blocks }, { ...operands, x, bias: x, y: byGemv }, params, {
            rows: 9,
            outputs: rows,
          });
          await bench.run(gemm[kind], constants, { ...operands, x, bias: x, y: byGemm }, params, {
            rows: 9,
            outputs: rows,
          });
          return [await bench.read(byGemv), await bench.read(byGemm)] as const;
        };
        const [expected] = await products("bf16", plain);
        const [byGemv, byGemm] = await products(encoding, packed);
        expectSame(byGemv, expected);
        expectSame(byGemm, expected);
      },
      60_000,
    );
  });

  test("that holds NaN or infinity says so in its absmax", async () => {
    const { scales } = await scalesOf(
      [
        [1, NaN, Infinity],
        [1, 2, -Infinity],
      ],
      3,
    );
    const [values] = await bench.read(scales);
    expect(Array.from(values!)).toEqual([NaN, Infinity]);
  });
});

/** The code of 0, by its bits. */
const ZERO_CODE: Record<number, number> = { 4: 7, 8: 0 };

/** Codes in words of four bytes, the first in the lowest bits. */
function encoded(weight: Matrix, encoding: "nf4" | "int8") {
  if (encoding === "nf4") {
    const { codes, absmax: scales } = quantizeNf4(weight);
    return { codes: codes.map((row) => pack(row, 4)), scales, values: dequantizeNf4({ codes, absmax: scales }) };
  }
  const { codes, scb: scales } = quantizeInt8(weight);
  return { codes: codes.map((row) => pack(row, 8)), scales, values: dequantizeInt8({ codes, scb: scales }) };
}

function pack(codes: number[], bits: number): number[] {
  const perWord = 32 / bits;
  const padded = Array.from({ length: strideOf(codes.length, "bf16") }, (_, i) => codes[i] ?? ZERO_CODE[bits]!);
  const words = Array.from({ length: (padded.length * bits) / 32 }, () => 0);
  padded.forEach((code, i) => {
    words[Math.floor(i / perWord)]! |= (code & (2 ** bits - 1)) << ((i % perWord) * bits);
  });
  return words.map((word) => word >>> 0);
}

const unpack = (rows: Matrix, bits: number, columns: number): number[][] =>
  rows.map((row) =>
    Array.from(
      { length: columns },
      (_, i) => (row[Math.floor((i * bits) / 32)]! >>> ((i * bits) % 32)) & (2 ** bits - 1),
    ),
  );
