import { hasPackedDot } from "../../gpu/language.ts";
import { strideOf } from "../../gpu/tensor.ts";
import {
  gemmCodes,
  GEMV_OUTPUTS,
  gemvCodes,
  OUTLIER_COLUMNS,
  outlierColumns,
  quantizeRows,
  WORKGROUP,
} from "../../kernels/index.ts";
import {
  llmInt8,
  outlierColumns as outlierReference,
  quantizeRows as rowsReference,
} from "../../kernels/reference/llm-int8.ts";
import type { Matrix } from "../../kernels/reference/matrix.ts";
import { quantizeInt8 } from "../../kernels/reference/quantize.ts";
import type { Bench } from "./bench.ts";
import { Sampler } from "./sampler.ts";
import { type SelfTest, selfTest } from "./self-test.ts";
import { sameAs } from "./verdict.ts";

// The steps of LLM.int8(), each with what the reference says of the step before it.
const ROWS = 33;
const COLUMNS = 75;
const OUTPUTS = 37;
const STRIDE = strideOf(COLUMNS, "f32");

/** float32 values with some outliers. */
function xOf(): number[][] {
  const x = new Sampler(30).f32(ROWS, COLUMNS);
  x[0]![3] = 6;
  x[5]![74] = 16;
  x[20]![40] = -26;
  return x;
}

const missingDot = async () => ((await hasPackedDot()) ? undefined : "WGSL has no dot4I8Packed here");

export const LLM_INT8_TESTS: readonly SelfTest[] = [
  selfTest(outlierColumns, async (bench, kernel) => {
    const x = xOf();
    const outliers = bench.output(1, Math.ceil(STRIDE / OUTLIER_COLUMNS), "u32");
    const bindings = { x: bench.input(x), outliers };
    await bench.run(kernel, { STRIDE }, bindings, { rows: ROWS }, { stride: STRIDE });
    return sameAs(await bench.read(outliers), [outlierWords(x)]);
  }),

  selfTest(quantizeRows, async (bench, kernel) => {
    const x = xOf();
    const expected = rowsReference(x);
    const codes = bench.output(ROWS, STRIDE / 4, "u32");
    const row_scale = bench.output(1, ROWS);
    const bindings = { x: bench.input(x), outliers: bench.input([outlierWords(x)], "u32"), codes, row_scale };
    await bench.run(kernel, { STRIDE, WORKGROUP }, bindings, {}, { rows: ROWS });
    const wrong = sameAs(await bench.read(codes), expected.codes.map(packed));
    return wrong ?? sameAs(await bench.read(row_scale), [expected.scale]);
  }),

  ...(["packed", "unpacked"] as const).flatMap((dot) => [
    selfTest(
      gemvCodes[dot],
      async (bench: Bench, kernel) => {
        const { bindings, expected } = layer(bench);
        await bench.run(kernel, { ...CONSTANTS, OUTPUTS: GEMV_OUTPUTS }, bindings, PARAMS, PARAMS);
        return sameAs(await bench.read(bindings.y), expected);
      },
      { variant: dot, missing: dot === "packed" ? missingDot : undefined },
    ),
    selfTest(
      gemmCodes[dot],
      async (bench: Bench, kernel) => {
        const { bindings, expected } = layer(bench);
        await bench.run(kernel, CONSTANTS, bindings, PARAMS, PARAMS);
        return sameAs(await bench.read(bindings.y), expected);
      },
      { variant: dot, missing: dot === "packed" ? missingDot : undefined },
    ),
  ]),
];

const CONSTANTS = {
  WEIGHT_STRIDE: strideOf(COLUMNS, "bf16"),
  STRIDE_OUT: strideOf(OUTPUTS, "f32"),
  OUT_AT: 0,
  HAS_BIAS: 1,
};
const PARAMS = { rows: ROWS, outputs: OUTPUTS, first_output: 0 };

function layer(bench: Bench) {
  const sampler = new Sampler(31);
  const weight = quantizeInt8(sampler.bf16(OUTPUTS, COLUMNS, 0.1));
  const [bias] = sampler.bf16(1, OUTPUTS);
  const x = xOf();
  const { codes, scale } = rowsReference(x);
  const bindings = {
    weight: bench.input(weight.codes.map(packed), "u32"),
    scales: bench.input([weight.scb]),
    codes: bench.input(codes.map(packed), "u32"),
    row_scale: bench.input([scale]),
    x: bench.input(x),
    outliers: bench.input([outlierWords(x)], "u32"),
    bias: bench.input([bias!]),
    y: bench.output(ROWS, OUTPUTS),
  };
  return { bindings, expected: llmInt8(x, weight, bias) };
}

/** A bit for each column. */
function outlierWords(x: Matrix): Uint32Array {
  const words = new Uint32Array(Math.ceil(STRIDE / OUTLIER_COLUMNS));
  for (const column of outlierReference(x)) words[Math.floor(column / 32)]! |= 1 << (column % 32);
  return words;
}

/** Codes in words of four bytes, the first in the lowest bits. */
function packed(codes: readonly number[]): Uint32Array {
  const bytes = new Int8Array(STRIDE);
  bytes.set(codes);
  return new Uint32Array(bytes.buffer);
}
