import { strideOf } from "../../gpu/tensor.ts";
import { absorbQuery, expandValue, latentWrite, WORKGROUP } from "../../kernels/index.ts";
import { absorbQuery as absorbReference, expandValue as expandReference } from "../../kernels/reference/latent.ts";
import { roundBf16 } from "../../kernels/reference/bf16.ts";
import { cacheRow } from "./attention.ts";
import type { Bench } from "./bench.ts";
import { Sampler } from "./sampler.ts";
import { type SelfTest, selfTest } from "./self-test.ts";
import { sameAs } from "./verdict.ts";
import { encoded, ENCODED, ENCODINGS } from "./weights.ts";

// Three heads with 12 rows each of the weight that `weights.ts` encodes, and six tokens: a group of four, and two.
const SHAPE = { heads: 3, plain: 7, turned: 6, value: 5 };
const ROWS = 6;
const LATENT = ENCODED.columns;
const [QUERY, WIDE] = [SHAPE.heads * (SHAPE.plain + SHAPE.turned), SHAPE.heads * (LATENT + SHAPE.turned)];
const CONSTANTS = {
  WEIGHT_STRIDE: ENCODED.stride,
  COLUMNS: LATENT,
  PLAIN: SHAPE.plain,
  TURNED: SHAPE.turned,
  VALUE: SHAPE.value,
  LATENT,
};
const PARAMS = { rows: ROWS, first_head: 0 };
const DIMS = { rows: ROWS, heads: SHAPE.heads, latent: LATENT, value: SHAPE.value };

export const LATENT_TESTS: readonly SelfTest[] = [
  selfTest(latentWrite, async (bench, kernel) => {
    const x = new Sampler(70).f32(4, 31);
    const slots = [7, 2, 0, 9];
    const cache = bench.output(10, 16, "u32");
    const constants = { STRIDE: strideOf(31, "f32"), COLUMNS: 31, WORKGROUP };
    const bindings = { x: bench.input(x), slots: bench.input([slots], "u32"), cache };
    await bench.run(kernel, constants, bindings, {}, { rows: 4, columns: 16 });
    const rows = await bench.read(cache);
    return sameAs(
      slots.map((slot) => rows[slot]!),
      x.map((row) => cacheRow([row.map(roundBf16)])),
    );
  }),

  // Products of bfloat16 values are exact, and each output is added up in one order: the results are the same to the bit.
  ...ENCODINGS.flatMap((encoding) => [
    selfTest(absorbQuery[encoding], async (bench: Bench, kernel) => {
      const q = new Sampler(71).bf16(ROWS, QUERY);
      const { operands, values } = encoded(bench, encoding);
      const y = bench.output(ROWS, WIDE);
      const constants = { ...CONSTANTS, STRIDE: strideOf(QUERY, "f32"), STRIDE_OUT: y.stride };
      await bench.run(kernel, constants, { ...operands, q: bench.input(q), y }, PARAMS, DIMS);
      return sameAs(await bench.read(y), absorbReference(q, values, SHAPE));
    }),
    selfTest(expandValue[encoding], async (bench: Bench, kernel) => {
      const x = new Sampler(72).bf16(ROWS, WIDE);
      const { operands, values } = encoded(bench, encoding);
      const y = bench.output(ROWS, SHAPE.heads * SHAPE.value);
      const constants = { ...CONSTANTS, STRIDE: strideOf(WIDE, "f32"), STRIDE_OUT: y.stride };
      await bench.run(kernel, constants, { ...operands, x: bench.input(x), y }, PARAMS, DIMS);
      return sameAs(await bench.read(y), expandReference(x, values, SHAPE));
    }),
  ]),
];
