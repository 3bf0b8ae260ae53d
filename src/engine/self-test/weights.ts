import type { Kernel } from "../../gpu/kernel.ts";
import { strideOf } from "../../gpu/tensor.ts";
import {
  absmax,
  dequantize,
  type Encoding,
  gemm,
  gemmLanes,
  gemv,
  gemvLanes,
  GEMV_OUTPUTS,
  quantizeInt8,
  quantizeNf4,
  type Sharing,
  SUBGROUP_LANES,
  WORKGROUP,
} from "../../kernels/index.ts";
import { linearInOrder } from "../../kernels/reference/linear.ts";
import { type Matrix, matrixOf } from "../../kernels/reference/matrix.ts";
import {
  dequantize4bit,
  dequantizeInt8,
  FP4,
  NF4,
  quantizeInt8 as int8Reference,
  quantizeNf4 as nf4Reference,
} from "../../kernels/reference/quantize.ts";
import type { Bench } from "./bench.ts";
import { Sampler } from "./sampler.ts";
import { bySharing, type SelfTest, selfTest } from "./self-test.ts";
import { sameAs } from "./verdict.ts";

// A weight [37, 75]: rows end in the middle of a load of eight, blocks of 64 begin anywhere. 33 rows of x: a tile and one.
const OUTPUTS = 37;
const COLUMNS = 75;
const ROWS = 33;
const STRIDE = strideOf(COLUMNS, "bf16");
export const ENCODINGS: readonly Encoding[] = ["bf16", "int8", "nf4", "fp4"];

/** The shape of what `encoded` gives. */
export const ENCODED = { rows: OUTPUTS, columns: COLUMNS, stride: STRIDE } as const;

export const SHARINGS = Object.keys(SUBGROUP_LANES) as Sharing[];

const weightOf = (): number[][] => new Sampler(20).bf16(OUTPUTS, COLUMNS, 0.05);

export const WEIGHT_TESTS: readonly SelfTest[] = [
  selfTest(absmax, async (bench, kernel) => {
    const weight = weightOf();
    const blocks = Math.ceil((OUTPUTS * COLUMNS) / 64);
    const scales = bench.output(1, blocks);
    const constants = { COLUMNS, X_STRIDE: STRIDE, BLOCK: 64, WORKGROUP };
    const bindings = { x: bench.input(weight, "bf16"), absmax: scales };
    await bench.run(kernel, constants, bindings, { values: OUTPUTS * COLUMNS }, { blocks });
    return sameAs(await bench.read(scales), [nf4Reference(weight).absmax]);
  }),

  selfTest(quantizeNf4, async (bench, kernel) => {
    const weight = weightOf();
    const expected = nf4Reference(weight);
    const codes = bench.output(OUTPUTS, STRIDE / 8, "u32");
    const bindings = { x: bench.input(weight, "bf16"), absmax: bench.input([expected.absmax]), codes };
    const dims = { rows: OUTPUTS, columns: STRIDE };
    await bench.run(kernel, { COLUMNS, X_STRIDE: STRIDE, WORKGROUP }, bindings, { rows: OUTPUTS }, dims);
    return sameAs(unpacked(await bench.read(codes), 4), expected.codes);
  }),

  selfTest(quantizeInt8, async (bench, kernel) => {
    const weight = weightOf();
    const expected = int8Reference(weight);
    const codes = bench.output(OUTPUTS, STRIDE / 4, "u32");
    const scale = bench.input([expected.scb.map((value) => Math.fround(Math.fround(1 / value) * 127))]);
    const bindings = { x: bench.input(weight, "bf16"), scale, codes };
    const dims = { rows: OUTPUTS, columns: STRIDE };
    await bench.run(kernel, { X_STRIDE: STRIDE, WORKGROUP }, bindings, { rows: OUTPUTS }, dims);
    const signed = unpacked(await bench.read(codes), 8).map((row) => row.map((code) => (code << 24) >> 24));
    return sameAs(signed, expected.codes);
  }),

  ...ENCODINGS.flatMap((encoding) => [
    selfTest(dequantize[encoding], async (bench: Bench, kernel) => {
      const { operands, values } = encoded(bench, encoding);
      const y = bench.output(OUTPUTS, COLUMNS);
      const dims = { rows: OUTPUTS, columns: STRIDE };
      await bench.run(kernel, { ...SHAPE, WORKGROUP }, { ...operands, y }, { rows: OUTPUTS }, dims);
      return sameAs(await bench.read(y), values);
    }),
    // Products of bfloat16 values are exact, and all kernels add in one order: the results are the same to the bit.
    selfTest(gemv[encoding], async (bench: Bench, kernel) => {
      const { x, bias, bindings, values } = layer(bench, encoding);
      const constants = { ...LAYER, OUTPUTS: GEMV_OUTPUTS, BLOCKS: Math.ceil(STRIDE / 32) };
      await bench.run(kernel, constants, bindings, PARAMS, PARAMS);
      return sameAs(await bench.read(bindings.y), linearInOrder(x, values, bias, true));
    }),
    selfTest(gemm[encoding], (bench, kernel) => product(bench, encoding, kernel)),
    ...SHARINGS.flatMap((sharing) => [
      selfTest(gemvLanes[sharing][encoding], (bench, kernel) => product(bench, encoding, kernel), bySharing(sharing)),
      selfTest(gemmLanes[sharing][encoding], (bench, kernel) => product(bench, encoding, kernel), bySharing(sharing)),
    ]),
  ]),
];

const SHAPE = { WEIGHT_STRIDE: STRIDE, COLUMNS };
const LAYER = { ...SHAPE, STRIDE_OUT: strideOf(OUTPUTS, "f32"), HAS_BIAS: 1, ROUND: 1, OUT_AT: 0 };
const PARAMS = { rows: ROWS, outputs: OUTPUTS, first_output: 0 };

type Operands = "weight" | "scales" | "x" | "bias" | "y";

async function product<P extends keyof typeof PARAMS>(
  bench: Bench,
  encoding: Encoding,
  kernel: Kernel<Operands, keyof typeof LAYER, P, typeof PARAMS>,
) {
  const { x, bias, bindings, values } = layer(bench, encoding);
  await bench.run(kernel, LAYER, bindings, PARAMS, PARAMS);
  return sameAs(await bench.read(bindings.y), linearInOrder(x, values, bias, true));
}

function layer(bench: Bench, encoding: Encoding) {
  const sampler = new Sampler(21);
  const x = sampler.bf16(ROWS, COLUMNS);
  const [bias] = sampler.bf16(1, OUTPUTS);
  const { operands, values } = encoded(bench, encoding);
  const y = bench.output(ROWS, OUTPUTS);
  return { x, bias, values, bindings: { ...operands, x: bench.input(x), bias: bench.input([bias!]), y } };
}

/** The weight on the device, and the values that it then has. */
export function encoded(bench: Bench, encoding: Encoding) {
  const weight = weightOf();
  switch (encoding) {
    case "bf16": {
      const operands = { weight: bench.input(weight, "bf16"), scales: bench.input([[Number.NaN]]) };
      return { operands, values: weight };
    }
    case "int8": {
      const int8 = int8Reference(weight);
      const operands = { weight: bench.input(packed(int8.codes, 8, 0), "u32"), scales: bench.input([int8.scb]) };
      return { operands, values: dequantizeInt8(int8) };
    }
    case "nf4":
    case "fp4": {
      // Any codes do for FP4, which is loaded and never made here.
      const { codes, absmax: scales } = nf4Reference(weight);
      const book = encoding === "nf4" ? NF4 : FP4;
      const weight4 = bench.input(packed(codes, 4, book.indexOf(0)), "u32");
      const operands = { weight: weight4, scales: bench.input([scales]) };
      return { operands, values: dequantize4bit({ codes, absmax: scales }, book) };
    }
  }
}

/** `zero`: the code behind the last column, as a load puts it there. */
function packed(codes: readonly (readonly number[])[], bits: 4 | 8, zero: number): Matrix {
  const perWord = 32 / bits;
  return codes.map((row) => {
    const words = new Uint32Array(STRIDE / perWord);
    for (let i = 0; i < STRIDE; i++) {
      const code = row[i] ?? zero;
      words[Math.floor(i / perWord)]! |= (code & (2 ** bits - 1)) << ((i % perWord) * bits);
    }
    return words;
  });
}

const unpacked = (rows: Matrix, bits: 4 | 8): number[][] =>
  matrixOf(rows.length, COLUMNS, (row, i) => {
    const word = rows[row]![Math.floor((i * bits) / 32)]!;
    return (word >>> ((i * bits) % 32)) & (2 ** bits - 1);
  });
