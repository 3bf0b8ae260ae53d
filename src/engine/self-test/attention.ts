import { strideOf } from "../../gpu/tensor.ts";
import {
  attentionDecode,
  attentionLanes,
  attentionMerge,
  attentionPrefill,
  chunksOf,
  kvWrite,
  PAGE_TOKENS,
  partialSize,
  prefillShape,
  WORKGROUP,
} from "../../kernels/index.ts";
import { attention, type Heads } from "../../kernels/reference/attention.ts";
import { bitsOfBf16 } from "../../kernels/reference/bf16.ts";
import { kvWrite as kvReference } from "../../kernels/reference/kv-write.ts";
import { type Matrix, matrixOf } from "../../kernels/reference/matrix.ts";
import type { Bench } from "./bench.ts";
import { Sampler } from "./sampler.ts";
import { bySharing, type SelfTest, selfTest, type Verdict } from "./self-test.ts";
import { sameAs, within } from "./verdict.ts";

// One sequence of 45 tokens in two pages that lie in the wrong order; the last 13 tokens are in the call. Four heads share
// two key heads of an odd size.
const SHAPE = { heads: 4, kvHeads: 2, headDim: 21 };
const TOKENS = 45;
const BEGIN = 32;
const PAGES = [1, 0];
const MOST_QUERIES = 8;
/** First token, queries, first position, first page. */
const RUNS = [
  [0, 8, BEGIN, 0],
  [8, 5, BEGIN + 8, 0],
];
const SCALE = 1 / Math.sqrt(SHAPE.headDim);
const COLUMNS = (SHAPE.heads + 2 * SHAPE.kvHeads) * SHAPE.headDim;
const WORDS = SHAPE.kvHeads * Math.ceil(SHAPE.headDim / 2);
const CLOSE = 1e-5;

export const ATTENTION_TESTS: readonly SelfTest[] = [
  selfTest(kvWrite, async (bench, kernel) => {
    const qkv = new Sampler(40).f32(5, COLUMNS);
    const slots = [7, 2, 0, 9, 4];
    const [keys, values] = [bench.output(10, WORDS, "u32"), bench.output(10, WORDS, "u32")];
    const constants = {
      STRIDE: strideOf(COLUMNS, "f32"),
      KV_HEADS: SHAPE.kvHeads,
      HEAD_DIM: SHAPE.headDim,
      HEAD_STRIDE: SHAPE.headDim,
      KEYS_AT: SHAPE.heads * SHAPE.headDim,
      VALUES_AT: (SHAPE.heads + SHAPE.kvHeads) * SHAPE.headDim,
      WORKGROUP,
    };
    const bindings = { qkv: bench.input(qkv), slots: bench.input([slots], "u32"), keys, values };
    await bench.run(kernel, constants, bindings, {}, { rows: slots.length, columns: WORDS });
    const expected = kvReference(qkv, SHAPE);
    const written = async (tensor: typeof keys) => {
      const rows = await bench.read(tensor);
      return slots.map((slot) => rows[slot]!);
    };
    const wrong = sameAs(await written(keys), expected.keys.map(cacheRow));
    return wrong ?? sameAs(await written(values), expected.values.map(cacheRow));
  }),

  selfTest(attentionPrefill, async (bench, kernel) => {
    const call = prepare(bench);
    const part = prefillShape(SHAPE.headDim, bench.device.limits.maxComputeWorkgroupStorageSize, MOST_QUERIES);
    const y = bench.output(TOKENS - BEGIN, SHAPE.heads * SHAPE.headDim);
    const bindings = { ...call.operands, queries: bench.input(RUNS, "u32"), y };
    const dims = { runs: RUNS.length, heads: SHAPE.heads, parts: MOST_QUERIES / part.QUERIES };
    await bench.run(kernel, { ...CONSTANTS, ...part, STRIDE_OUT: y.stride }, bindings, { first_run: 0 }, dims);
    return within(await bench.read(y), call.expected, CLOSE);
  }),

  ...(["lanes8", "plain"] as const).map((sharing) =>
    selfTest(
      attentionLanes[sharing],
      async (bench, kernel) => {
        const call = prepare(bench);
        const y = bench.output(TOKENS - BEGIN, SHAPE.heads * SHAPE.headDim);
        const bindings = { ...call.operands, queries: bench.input(RUNS, "u32"), y };
        const dims = { runs: RUNS.length, heads: SHAPE.heads, most: MOST_QUERIES };
        await bench.run(kernel, { ...CONSTANTS, STRIDE_OUT: y.stride }, bindings, { first_run: 0 }, dims);
        return within(await bench.read(y), call.expected, CLOSE);
      },
      bySharing(sharing),
    ),
  ),

  selfTest(attentionDecode, (bench, kernel) => decode(bench, kernel, attentionMerge)),
  selfTest(attentionMerge, (bench, kernel) => decode(bench, attentionDecode, kernel)),
];

const CONSTANTS = {
  HEAD_DIM: SHAPE.headDim,
  HEADS: SHAPE.heads,
  KV_HEADS: SHAPE.kvHeads,
  STRIDE: strideOf(COLUMNS, "f32"),
  HEAD_STRIDE: SHAPE.headDim,
  SCALE,
  SOFTCAP: 0,
  WINDOW: 0,
};

/** Each of the queries by itself, in chunks that are merged. */
async function decode(
  bench: Bench,
  decodeKernel: typeof attentionDecode,
  mergeKernel: typeof attentionMerge,
): Promise<Verdict> {
  const { operands, expected } = prepare(bench);
  const y = bench.output(expected.length, SHAPE.heads * SHAPE.headDim);
  const runs = expected.map((_, index) => [index, 1, BEGIN + index, 0]);
  const queries = bench.input(runs, "u32");
  const chunks = chunksOf(TOKENS);
  const partial = bench.output(1, runs.length * partialSize(SHAPE.heads, SHAPE.headDim, TOKENS));
  const dims = { runs: runs.length, heads: SHAPE.heads, chunks };
  const params = { chunks, first_run: 0 };
  await bench.run(decodeKernel, CONSTANTS, { ...operands, queries, partial }, params, dims);
  const merged = { ...CONSTANTS, STRIDE_OUT: y.stride };
  await bench.run(mergeKernel, merged, { queries, partial, y }, params, dims);
  return within(await bench.read(y), expected, CLOSE);
}

/** The call on the device, and what comes of it. */
function prepare(bench: Bench) {
  const { heads, kvHeads, headDim } = SHAPE;
  const sampler = new Sampler(41);
  const queries = Array.from({ length: TOKENS - BEGIN }, () => sampler.f32(heads, headDim));
  const [keys, values] = [0, 1].map(() => Array.from({ length: TOKENS }, () => sampler.bf16(kvHeads, headDim)));
  const rows = queries.map((query) => [...query.flat(), ...Array.from({ length: 2 * kvHeads * headDim }, () => NaN)]);
  const inPages = (tokens: Heads): Matrix => {
    const slots = matrixOf(PAGES.length * PAGE_TOKENS, WORDS, () => 0x7fc17fc1); // NaN where nothing is kept
    tokens.forEach((token, position) => {
      slots[PAGES[Math.floor(position / PAGE_TOKENS)]! * PAGE_TOKENS + (position % PAGE_TOKENS)] = cacheRow(token);
    });
    return slots;
  };
  const operands = {
    qkv: bench.input(rows),
    keys: bench.input(inPages(keys!), "u32"),
    values: bench.input(inPages(values!), "u32"),
    pages: bench.input([PAGES], "u32"),
  };
  const expected = attention(queries, keys!, values!, { scale: SCALE }, BEGIN).map((one) => one.flat());
  return { operands, expected };
}

/** A token's keys (or values) as they lie in the cache: two bfloat16 to a word, a head of odd size ends with a zero. */
export const cacheRow = (heads: Heads[number]): number[] =>
  heads.flatMap((values) =>
    Array.from({ length: Math.ceil(values.length / 2) }, (_, word) => {
      const [low, high] = [values[word * 2]!, values[word * 2 + 1] ?? 0];
      return (bitsOfBf16(low) | (bitsOfBf16(high) << 16)) >>> 0;
    }),
  );
