import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Commands } from "../../src/gpu/commands.ts";
import type { Device } from "../../src/gpu/device.ts";
import { PipelineCache } from "../../src/gpu/kernel.ts";
import { strideOf, TensorStore } from "../../src/gpu/tensor.ts";
import { dequantize, WORKGROUP } from "../../src/kernels/index.ts";
import { bf16ArrayToF32, convertToBf16, type FloatDtype } from "../../src/quant/bf16.ts";
import { readHeader } from "../../src/safetensors/header.ts";
import { quantizeMatrix, splitRows } from "../../src/weights/quantize.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES } from "../support/oracle.ts";

/** Weights, and what bitsandbytes made of them once they were bfloat16 (`…cast…`): see `test/fixtures/README.md`. */
const path = join(FIXTURES, "bnb/quantize.safetensors");
const entries = readHeader(path);
const file = readFileSync(path);

const bytes = (name: string): Uint8Array<ArrayBuffer> => {
  const { begin, end } = entries.get(name)!;
  return Uint8Array.from(file.subarray(begin, end));
};
const floats = (name: string): Float32Array => new Float32Array(bytes(name).buffer);

const WEIGHTS = [...entries.values()]
  .filter(({ name }) => /^[\w-]+\.(f32|bf16|f16)\.weight$/.test(name))
  .map(({ name, dtype, shape }) => ({
    weight: name.slice(0, -".weight".length),
    dtype: dtype as FloatDtype,
    rows: shape[0]!,
    columns: shape[1]!,
  }));
const has = ({ weight }: { weight: string }, encoding: string) => entries.has(`${weight}.cast.${encoding}.codes`);
const isBroken = ({ weight }: { weight: string }) => /^(nan|infinity)\./.test(weight);

describeOnDevices("what bitsandbytes makes of a weight", ({ open }) => {
  let device: Device;
  let store: TensorStore;
  let commands: Commands;
  beforeAll(async () => {
    device = await open();
    store = new TensorStore(device);
    commands = new Commands(device);
  });
  afterAll(async () => {
    store.destroyAll();
    commands.destroy();
    await device.reclaim();
  });

  /** The codes, row by row, and the scales. `partRows`: in parts of so many. */
  async function quantize(
    { weight, dtype, rows, columns }: (typeof WEIGHTS)[number],
    encoding: "nf4" | "int8",
    partRows = rows,
  ) {
    const values = new Uint16Array(rows * columns);
    convertToBf16(dtype, bytes(`${weight}.weight`), values);
    const stride = strideOf(columns, "bf16");
    const parts = Array.from({ length: Math.ceil(rows / partRows) }, (_, part) => {
      const firstRow = part * partRows;
      const count = Math.min(partRows, rows - firstRow);
      const padded = new Uint16Array(count * stride);
      for (let row = 0; row < count; row++) {
        padded.set(values.subarray((firstRow + row) * columns, (firstRow + row + 1) * columns), row * stride);
      }
      const tensor = store.create("weight", count, columns, "bf16");
      store.write(tensor, padded);
      return { firstRow, rows: count, tensor };
    });
    const context = { store, commands, pipelines: PipelineCache.of(device) };
    const matrix = await quantizeMatrix({ rows, columns, encoding: "bf16", parts }, encoding, weight, context);

    const codes: number[] = [];
    const scales: number[] = [];
    const weights: number[] = [];
    const constants = { WEIGHT_STRIDE: stride, COLUMNS: columns, WORKGROUP };
    const pipeline = await PipelineCache.of(device).compile(dequantize[encoding], constants);
    for (const part of matrix.parts) {
      const y = store.create("weights", part.rows, columns, "f32");
      const bindings = { weight: part.tensor, scales: part.scales!, y };
      commands.dispatch(pipeline, bindings, { rows: part.rows }, { rows: part.rows, columns: stride });
      const multiplied = new Float32Array((await commands.read(y)).buffer);
      for (let row = 0; row < part.rows; row++)
        weights.push(...multiplied.subarray(row * stride, row * stride + columns));
      store.destroy(y);
      const words = await commands.read(part.tensor, part.rows * part.tensor.rowBytes);
      const perByte = encoding === "nf4" ? 2 : 1;
      for (let row = 0; row < part.rows; row++) {
        const line = words.subarray(row * part.tensor.rowBytes);
        for (let i = 0; i < columns; i++) {
          const byte = line[Math.floor(i / perByte)]!;
          codes.push(encoding === "int8" ? (byte << 24) >> 24 : i % 2 === 0 ? byte & 15 : byte >> 4);
        }
      }
      const { buffer } = await commands.read(part.scales!, part.scales!.columns * 4);
      scales.push(...new Float32Array(buffer));
      store.destroy(part.tensor);
      store.destroy(part.scales!);
    }
    return { codes, scales, weights };
  }

  describe("its NF4 codes and absmax, byte for byte:", () => {
    test.each(WEIGHTS.filter((weight) => has(weight, "nf4") && !isBroken(weight)))(
      "$weight, $rows × $columns",
      async (weight) => {
        const expected = [...bytes(`${weight.weight}.cast.nf4.codes`)].flatMap((byte) => [byte >> 4, byte & 15]);
        const { codes, scales, weights } = await quantize(weight, "nf4");
        expect(codes).toEqual(expected.slice(0, codes.length));
        expect(scales).toEqual([...floats(`${weight.weight}.cast.nf4.absmax`)]);
        expectSameWeights(weights, `${weight.weight}.cast.nf4.dequantized`);
      },
    );
  });

  describe("its INT8 codes and SCB, byte for byte:", () => {
    // What float16 cannot hold has no SCB: refused, see below.
    const inRange = ({ weight }: { weight: string }) => floats(`${weight}.cast.int8.scb`).every(Number.isFinite);
    test.each(WEIGHTS.filter((weight) => has(weight, "int8") && inRange(weight)))(
      "$weight, $rows × $columns",
      async (weight) => {
        const { codes, scales, weights } = await quantize(weight, "int8");
        expect(codes).toEqual([...new Int8Array(bytes(`${weight.weight}.cast.int8.codes`).buffer)]);
        expect(scales).toEqual([...floats(`${weight.weight}.cast.int8.scb`)]);
        expectSameWeights(weights, `${weight.weight}.cast.int8.dequantized_bf16`);
      },
    );
  });

  test("is the same when the matrix lies in several parts", async () => {
    for (const weight of WEIGHTS.filter(({ rows }) => rows >= 24)) {
      const step = splitRows(weight.columns, "nf4");
      if (step < weight.rows) expect(await quantize(weight, "nf4", step)).toEqual(await quantize(weight, "nf4"));
      expect(await quantize(weight, "int8", 5)).toEqual(await quantize(weight, "int8"));
    }
  }, 60_000);

  test.each([
    ["nan", "nf4", /nan.*NaN.*no nf4 code/],
    ["nan", "int8", /nan.*NaN.*no int8 code/],
    ["infinity", "nf4", /infinity.*Infinity.*no nf4 code/],
    ["infinity", "int8", /infinity.*Infinity/],
    ["f16-overflow", "int8", /f16-overflow.*float16.*65504/],
  ] as const)("is refused by name where there is no such thing: %s in %s", async (name, encoding, says) => {
    const weight = WEIGHTS.find(({ weight }) => weight.startsWith(`${name}.`))!;
    expect(quantize(weight, encoding)).rejects.toThrow(says);
  });
});

/** The weights that kernels multiply by are bitsandbytes' own. A device may take subnormal ones for zero, and -0 for 0. */
function expectSameWeights(weights: readonly number[], name: string): void {
  const flushed = (value: number) => (Math.abs(value) < 2 ** -126 ? 0 : value);
  expect(weights.map(flushed)).toEqual(Array.from(bf16ArrayToF32(new Uint16Array(bytes(name).buffer)), flushed));
}
