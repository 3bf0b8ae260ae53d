import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { strideOf, type Tensor } from "../../src/gpu/tensor.ts";
import {
  gemmCodes,
  GEMV_OUTPUTS,
  gemvCodes,
  OUTLIER_COLUMNS,
  outlierColumns as outlierColumnsKernel,
  quantizeRows as quantizeRowsKernel,
  WORKGROUP,
} from "../../src/kernels/index.ts";
import { bf16ArrayToF32 } from "../../src/quant/bf16.ts";
import { readHeader } from "../../src/safetensors/header.ts";
import { bf16OfBits } from "../../src/kernels/reference/bf16.ts";
import { llmInt8, outlierColumns, quantizeRows } from "../../src/kernels/reference/llm-int8.ts";
import { type Matrix, matrixOf } from "../../src/kernels/reference/matrix.ts";
import { type Int8, quantizeInt8 } from "../../src/kernels/reference/quantize.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES } from "../support/oracle.ts";
import { Bench, expectSame, range, Sampler } from "./support.ts";

/** What bitsandbytes computes, and the steps between: see `test/fixtures/README.md`. */
const path = join(FIXTURES, "bnb/llm_int8.safetensors");
const entries = readHeader(path);
const file = readFileSync(path);
const CASES = [...entries.keys()].filter((name) => name.endsWith(".y")).map((name) => name.slice(0, -".y".length));

function values(name: string): number[] {
  const { begin, end, dtype } = entries.get(name)!;
  const { buffer } = Uint8Array.from(file.subarray(begin, end));
  switch (dtype) {
    case "BF16":
      return [...bf16ArrayToF32(new Uint16Array(buffer))];
    case "F32":
      return [...new Float32Array(buffer)];
    case "I32":
      return [...new Int32Array(buffer)];
    default:
      return [...new Int8Array(buffer)];
  }
}

function matrix(name: string): number[][] {
  const [rows, columns] = entries.get(name)!.shape as [number, number];
  const flat = values(name);
  return matrixOf(rows, columns, (row, column) => flat[row * columns + column]!);
}

interface Product {
  readonly x: Matrix;
  readonly weight: Int8;
  readonly bias?: readonly number[];
}

function fixture(name: string): Product {
  const weight = { codes: matrix(`${name}.codes`), scb: values(`${name}.scb`) };
  return { x: matrix(`${name}.x`), weight, bias: entries.has(`${name}.bias`) ? values(`${name}.bias`) : undefined };
}

/** float32 values that are not bfloat16 yet. */
function sample({ rows, columns, outputs, outliers }: (typeof SHAPES)[number]): Product {
  const sampler = new Sampler(rows * 1000 + columns);
  const x = sampler.f32(rows, columns);
  for (let i = 0; i < outliers; i++) x[sampler.integer(rows)]![sampler.integer(columns)] = 6 + 10 * i;
  return { x, weight: quantizeInt8(sampler.bf16(outputs, columns, 0.1)), bias: sampler.bf16(1, outputs)[0] };
}

const SHAPES = [
  { rows: 1, columns: 7, outputs: 1, outliers: 1 },
  { rows: 3, columns: 20, outputs: 5, outliers: 0 },
  { rows: 33, columns: 75, outputs: 37, outliers: 4 },
  { rows: 2, columns: 257, outputs: 66, outliers: 300 },
];

describe("the reference of LLM.int8() is bitsandbytes, to the bit:", () => {
  test.each(CASES)("%s", (name) => {
    const { x, weight, bias } = fixture(name);
    expect(outlierColumns(x)).toEqual(values(`${name}.outlier_columns`));
    expect(quantizeRows(x)).toEqual({ codes: matrix(`${name}.x_codes`), scale: values(`${name}.x_scale`) });
    expectSame(llmInt8(x, weight, bias), matrix(`${name}.y`));
    if (!entries.has(`${name}.y_row_by_row`)) return;
    expectSame(
      x.flatMap((row) => llmInt8([row], weight, bias)),
      matrix(`${name}.y_row_by_row`),
    );
  });
});

describeOnDevices("LLM.int8()", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  const quantize = async (x: Matrix) => {
    const [rows, columns] = [x.length, x[0]!.length];
    const stride = strideOf(columns, "f32");
    const tensor = bench.input(x);
    const outliers = bench.output(1, Math.ceil(stride / OUTLIER_COLUMNS), "u32");
    await bench.run(outlierColumnsKernel, { STRIDE: stride }, { x: tensor, outliers }, { rows }, { stride });
    const codes = bench.output(rows, stride / 4, "u32");
    const row_scale = bench.output(1, strideOf(rows, "f32"));
    const bindings = { x: tensor, outliers, codes, row_scale };
    await bench.run(quantizeRowsKernel, { STRIDE: stride, WORKGROUP }, bindings, {}, { rows });
    return bindings;
  };

  /** What the kernels before the product say, in the reference's terms. */
  const stepsOf = async (x: Matrix) => {
    const { outliers, codes, row_scale } = await quantize(x);
    const columns = range(0, x[0]!.length);
    const [words] = await bench.read(outliers);
    const rows = (await bench.read(codes)).map((row) => new Int8Array(Uint32Array.from(row).buffer));
    expect(rows.every((row) => row.subarray(columns.length).every((code) => code === 0))).toBe(true);
    return {
      outliers: columns.filter((column) => (words![Math.floor(column / 32)]! >>> (column % 32)) & 1),
      codes: rows.map((row) => [...row.subarray(0, columns.length)]),
      scale: [...(await bench.read(row_scale))[0]!.subarray(0, x.length)],
    };
  };

  /** By every kernel that there is for it. `parts`: rows of each part of the weight. */
  async function products(
    { x, weight, bias }: Product,
    parts = [weight.codes.length],
    outAt = 0,
  ): Promise<Record<string, Matrix>> {
    const [rows, columns, out] = [x.length, x[0]!.length, weight.codes.length];
    const operands = await quantize(x);
    const constants = {
      WEIGHT_STRIDE: strideOf(columns, "bf16"),
      STRIDE_OUT: strideOf(outAt + out, "f32"),
      OUT_AT: outAt,
      HAS_BIAS: bias ? 1 : 0,
      OUTPUTS: GEMV_OUTPUTS,
    };
    const biasTensor = bench.input([bias ?? [NaN]]);
    const results: Record<string, Tensor> = {};
    for (const dot of ["packed", "unpacked"] as const) {
      for (const [name, kernel] of Object.entries({ gemv: gemvCodes[dot], gemm: gemmCodes[dot] })) {
        const y = bench.output(rows, outAt + out);
        let first_output = 0;
        for (const outputs of parts) {
          const codes = weight.codes.slice(first_output, first_output + outputs).map(packed);
          const scales = bench.input([weight.scb.slice(first_output, first_output + outputs)]);
          const bindings = { ...operands, weight: bench.input(codes, "u32"), scales, bias: biasTensor, y };
          await bench.run(kernel, constants, bindings, { rows, outputs, first_output }, { rows, outputs });
          first_output += outputs;
        }
        results[`${name} ${dot}`] = y;
      }
    }
    const read: Record<string, Matrix> = {};
    for (const [name, y] of Object.entries(results)) read[name] = await bench.read(y);
    return read;
  }

  test.each(CASES)(
    "is bitsandbytes', to the bit: %s",
    async (name) => {
      const { x, ...layer } = fixture(name);
      expect(await stepsOf(x)).toEqual({
        outliers: values(`${name}.outlier_columns`),
        codes: matrix(`${name}.x_codes`),
        scale: values(`${name}.x_scale`),
      });
      for (const y of Object.values(await products({ x, ...layer }))) expectSame(y, matrix(`${name}.y`));
      if (!entries.has(`${name}.y_row_by_row`) || x.length > 7) return;
      const expected = matrix(`${name}.y_row_by_row`);
      for (const [row, values] of x.entries()) {
        for (const y of Object.values(await products({ x: [values], ...layer }))) expectSame(y, [expected[row]!]);
      }
    },
    60_000,
  );

  test.each(SHAPES)(
    "is the reference's at $rows × $columns × $outputs",
    async (shape) => {
      const product = sample(shape);
      expect(await stepsOf(product.x)).toEqual({
        outliers: outlierColumns(product.x),
        ...quantizeRows(product.x),
      });
      const expected = llmInt8(product.x, product.weight, product.bias);
      for (const y of Object.values(await products(product))) expectSame(y, expected);
      const inParts = await products(
        product,
        [1, shape.outputs - 1].filter((rows) => rows > 0),
      );
      for (const y of Object.values(inParts)) expectSame(y, expected);
      for (const y of Object.values(await products(product, [shape.outputs], 11))) {
        expectSame(
          y.map((row) => Array.from(row).slice(11)),
          expected,
        );
      }
    },
    60_000,
  );

  test("divides 127 by every scale there is as torch does, halves of a code included", async () => {
    // Every bfloat16 number from below float16's smallest to 6, as the largest of a row with every half and quarter of it.
    const magnitudes = range(0x3280, 0x40c0).map(bf16OfBits);
    const x = magnitudes.map((largest) =>
      range(0, 24).map((i) => (i === 0 ? largest : (largest * i * (i % 2 === 0 ? 1 : -1)) / 24)),
    );
    for (const row of x) row.splice(20, 4, row[0]! / 2, -row[0]! / 2, row[0]! / 4, row[0]! / 254);
    const { codes, scale } = await stepsOf(x);
    const expected = quantizeRows(x);
    expect(scale).toEqual(expected.scale);
    expect(codes).toEqual(expected.codes);
  }, 60_000);

  test("adds up the longest rows of the largest codes exactly", async () => {
    const all = (value: number) => Array.from({ length: 133_144 }, () => value);
    const weight = { codes: [all(127), all(-127)], scb: [1, 1] };
    const x = [all(1)];
    for (const y of Object.values(await products({ x, weight }))) expectSame(y, [[133_120, -133_120]]); // in steps of 1024
  }, 60_000);

  test("says NaN where a row has NaN, and leaves the other rows alone", async () => {
    const { weight, bias } = fixture("tokens");
    const x = matrix("tokens.x");
    const expected = llmInt8(x, weight, bias);
    x[1]![3] = NaN;
    for (const y of Object.values(await products({ x, weight, bias }))) {
      expect(Array.from(y[1]!).filter((value) => !Number.isNaN(value))).toEqual([]);
      expectSame(y.toSpliced(1, 1), expected.toSpliced(1, 1));
    }
  });
});

/** Codes in words of four bytes, the first in the lowest bits. */
function packed(codes: readonly number[]): Uint32Array {
  const bytes = new Int8Array(strideOf(codes.length, "bf16"));
  bytes.set(codes);
  return new Uint32Array(bytes.buffer);
}
