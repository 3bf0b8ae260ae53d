import { afterAll, afterEach, beforeAll, describe, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import {
  attentionDecode,
  attentionLanes,
  attentionMerge,
  attentionPrefill,
  chunksOf,
  PAGE_TOKENS,
  partialSize,
  prefillShape,
} from "../../src/kernels/index.ts";
import { attention, dot, type Heads, kvHeadOf } from "../../src/kernels/reference/attention.ts";
import type { HeadShape } from "../../src/kernels/reference/kv-write.ts";
import { type Matrix, matrixOf } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, cacheRow, expectSame, expectWithin, range, Sampler, U } from "./support.ts";

interface Shape extends HeadShape {
  window?: number;
  softcap?: number;
  /** Columns from one query head to the next, where they lie apart. */
  headStride?: number;
  /** Bytes of workgroup memory for which the kernel is shaped. */
  memory?: number;
}

const SHAPES: Shape[] = [
  { heads: 3, kvHeads: 1, headDim: 15 }, // an odd head ends with half a word
  { heads: 5, kvHeads: 5, headDim: 20 },
  { heads: 6, kvHeads: 2, headDim: 24 }, // heads 0 to 2 share one key head, 3 to 5 the other
  { heads: 3, kvHeads: 3, headDim: 64 },
  { heads: 1, kvHeads: 1, headDim: 128 }, // more dimensions than lanes
  { heads: 2, kvHeads: 1, headDim: 256 }, // keys and values in two slices
  { heads: 2, kvHeads: 1, headDim: 256, memory: 16384 }, // WebGPU's least: two queries at a time
  { heads: 2, kvHeads: 1, headDim: 136, softcap: 5 }, // a last slice of four words
  { heads: 4, kvHeads: 2, headDim: 16, softcap: 2 },
  { heads: 2, kvHeads: 2, headDim: 20, headStride: 60 }, // head by head query, key and value
  { heads: 4, kvHeads: 2, headDim: 16, window: 1 }, // every token sees itself only
  { heads: 4, kvHeads: 2, headDim: 16, window: 7 },
  { heads: 4, kvHeads: 2, headDim: 16, window: 32 }, // as long as a chunk
  { heads: 4, kvHeads: 2, headDim: 16, window: 65, softcap: 3 }, // of some queries it holds two chunks and a key
  { heads: 4, kvHeads: 2, headDim: 16, window: 4096 }, // longer than any sequence
];

/** Positions [begin, end) whose queries are in the call: about the chunk of 32 keys, and in the middle of a sequence. */
const SPANS = [
  { begin: 0, end: 1 },
  { begin: 0, end: 31 },
  { begin: 31, end: 32 },
  { begin: 0, end: 33 },
  { begin: 57, end: 64 },
  { begin: 30, end: 65 }, // from one chunk through a second into a third
  { begin: 0, end: 65 },
  { begin: 168, end: 200 },
  { begin: 199, end: 200 },
];

/** Of a run. */
const MOST_QUERIES = 8;

/** How many queries the n-th run of a sequence takes. */
type Cut = (run: number) => number;
const RUNS_OF_8: Cut = () => 8;
const SINGLE_QUERIES: Cut = () => 1;
const UNEVEN_RUNS: Cut = (run) => [3, 8, 1, 5, 7, 2][run % 6]!;

describeOnDevices("attention", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  describe.each(SHAPES.map((shape) => [titleOf(shape), shape] as const))("with %s:", (_, shape) => {
    test("is softmax(q·k) v over each sequence up to the token", async () => {
      const sequences = makeSequences(shape, new Sampler(shape.headDim));
      const rounded = await new Call(bench, shape, sequences).prefill(RUNS_OF_8);
      expectWithin(rounded, expectedOf(shape, sequences), boundOf(shape, sequences, "rounded"));

      // Sums of sixteenths are exact in float32: with nothing lost in the scores the bound is tens of times narrower.
      const quarters = sequences.map((sequence) => ({
        ...sequence,
        queries: mapHeads(sequence.queries, toQuarters),
        keys: mapHeads(sequence.keys, toQuarters),
      }));
      const exact = await new Call(bench, shape, quarters).prefill(RUNS_OF_8);
      expectWithin(exact, expectedOf(shape, quarters), boundOf(shape, quarters, "exact"));
    }, 30_000);

    test("gives the same bits however the queries are cut into runs, and when each is decoded alone", async () => {
      const call = new Call(bench, shape, makeSequences(shape, new Sampler(shape.headDim + 1)));
      const prefilled = await call.prefill(RUNS_OF_8);
      expectSame(await call.prefill(SINGLE_QUERIES), prefilled);
      expectSame(await call.prefill(UNEVEN_RUNS), prefilled);
      expectSame(await call.decode(), prefilled);
      for (const sharing of ["lanes8", "plain"] as const) {
        if (sharing === "lanes8" && bench.device.info.subgroupMinSize < 8) continue;
        expectSame(await call.byLanes(RUNS_OF_8, sharing), prefilled);
        expectSame(await call.byLanes(SINGLE_QUERIES, sharing), prefilled);
      }
    }, 30_000);

    test("does not let one sequence see another", async () => {
      const sequences = makeSequences(shape, new Sampler(shape.headDim + 2));
      const together = await new Call(bench, shape, sequences).prefill(RUNS_OF_8);
      for (const index of [1, 5]) {
        const alone = new Call(bench, shape, [sequences[index]!]);
        const first = tokensOf(sequences.slice(0, index));
        const rows = together.slice(first, first + tokensOf([sequences[index]!]));
        expectSame(await alone.prefill(RUNS_OF_8), rows);
        expectSame(await alone.decode(), rows);
        expectSame(await alone.byLanes(UNEVEN_RUNS), rows);
      }
    });

    test("has weights that sum to one: values that are all equal come out as they are", async () => {
      // A power of two passes through the same roundings as the sum of the weights does, so that nothing is left.
      const sequences = makeSequences(shape, new Sampler(shape.headDim + 3));
      const even = sequences.map((sequence) => ({ ...sequence, values: mapHeads(sequence.values, () => -0.125) }));
      const call = new Call(bench, shape, even);
      const expected = matrixOf(tokensOf(even), shape.heads * shape.headDim, () => -0.125);
      expectSame(await call.prefill(RUNS_OF_8), expected);
      expectSame(await call.decode(), expected);
    });

    if (shape.softcap !== undefined) return; // which leaves no score far from another
    test("gives the best key's value where scores lie far apart", async () => {
      const sequences = makeSequences(shape, new Sampler(shape.headDim + 4), 1e35);
      const call = new Call(bench, shape, sequences);
      const expected = expectedOf(shape, sequences);
      expectSame(await call.prefill(RUNS_OF_8), expected);
      expectSame(await call.decode(), expected);
      expectSame(await call.byLanes(RUNS_OF_8), expected);
    });
  });
});

function titleOf({ heads, kvHeads, headDim, ...more }: Shape): string {
  const others = Object.entries(more).map(([name, value]) => `, ${name} ${value}`);
  return `${heads} heads, ${kvHeads} for keys, of ${headDim} dimensions${others.join("")}`;
}

/** The tokens [begin, begin + queries.length) of a sequence are in the call; the cache has it up to the last of them. */
interface Sequence {
  begin: number;
  queries: Heads;
  keys: Heads;
  values: Heads;
}

const makeSequences = (shape: Shape, sampler: Sampler, deviation = 2): Sequence[] =>
  SPANS.map(({ begin, end }) => ({
    begin,
    queries: range(begin, end).map(() => sampler.f32(shape.heads, shape.headDim, deviation)),
    keys: range(0, end).map(() => sampler.bf16(shape.kvHeads, shape.headDim)),
    values: range(0, end).map(() => sampler.bf16(shape.kvHeads, shape.headDim)),
  }));

const tokensOf = (sequences: readonly Sequence[]): number =>
  sequences.reduce((sum, { queries }) => sum + queries.length, 0);

const mapHeads = (tokens: Heads, change: (value: number) => number): Heads =>
  tokens.map((heads) => heads.map((values) => Array.from(values, change)));

const toQuarters = (value: number): number => Math.round(value * 4) / 4;

const scaleOf = ({ headDim }: HeadShape): number => 1 / Math.sqrt(headDim);

/** [tokens, heads * headDim] */
const expectedOf = (shape: Shape, sequences: readonly Sequence[]): Matrix =>
  sequences
    .flatMap(({ begin, queries, keys, values }) =>
      attention(queries, keys, values, { ...shape, scale: scaleOf(shape) }, begin),
    )
    .map((heads) => heads.flat());

/**
 * A score is off by e: two roundings, of SCALE and of the product with it, after a sum that is exact (quarters) or off by
 * U for each of its products and additions, of at most |q| |k| SCALE. The exponential takes a difference that is off by
 * U |x|, and WGSL promises it to 3 + 2|x| units in the last place: (6 + 5|x|) U together. A chunk's weights are
 * multiplied by one such factor for each later chunk, but all their |x| add up to no more than the distance D of two
 * scores. So a weight is off by a factor of e + (5 D + 8 (chunks + 1)) U; the sum of weighted values and the sum of
 * weights add (32 + 2 chunks) U each, and the division 5 U. What all weights have in common does not matter. A soft cap
 * never widens the distance of two scores, and is itself off by 64 U of a score.
 */
function boundOf(shape: Shape, sequences: readonly Sequence[], scores: "exact" | "rounded") {
  const magnitudes = expectedOf(
    shape,
    sequences.map((sequence) => ({ ...sequence, values: mapHeads(sequence.values, Math.abs) })),
  );
  const factors = sequences.flatMap(({ begin, queries, keys }) => {
    const chunks = chunksOf(begin + queries.length);
    const score = largestScore(shape, queries, keys);
    const sum = scaleOf(shape) * largestNorm(queries) * largestNorm(keys);
    const capError = shape.softcap === undefined ? 0 : 64 * Math.min(score, shape.softcap);
    const scoreError = 2 * score + (scores === "exact" ? 0 : (shape.headDim + 1) * sum) + capError;
    const weightError = scoreError + 5 * 2 * score + 8 * (chunks + 1);
    return queries.map(() => 1.01 * U * (2 * (weightError + 32 + 2 * chunks) + 5));
  });
  return (row: number, column: number): number => factors[row]! * magnitudes[row]![column]!;
}

const largestNorm = (tokens: Heads): number =>
  Math.max(...tokens.flatMap((heads) => heads.map((values) => Math.sqrt(dot(values, values)))));

function largestScore(shape: HeadShape, queries: Heads, keys: Heads): number {
  let largest = 0;
  for (const query of queries) {
    for (const key of keys) {
      for (let head = 0; head < shape.heads; head++) {
        largest = Math.max(largest, Math.abs(dot(query[head]!, key[kvHeadOf(head, shape)]!)));
      }
    }
  }
  return scaleOf(shape) * largest;
}

/** Page numbers for sequences that need so many each: all different, and none next to where it belongs. */
function scatteredPages(counts: readonly number[]): number[][] {
  const total = counts.reduce((sum, count) => sum + count, 0);
  let next = 0;
  return counts.map((count) => range(0, count).map(() => (total - 1 - next++ + Math.floor(total / 2)) % total));
}

/** One call: sequences in scattered pages of one cache, which holds NaN everywhere else, and their queries. */
class Call {
  readonly #sequences: readonly Sequence[];
  readonly #firstPages: readonly number[];
  readonly #constants;
  readonly #operands;

  constructor(
    readonly bench: Bench,
    readonly shape: Shape,
    sequences: readonly Sequence[],
  ) {
    const { heads, kvHeads, headDim } = shape;
    const headStride = shape.headStride ?? headDim;
    const columns = Math.max((heads + 2 * kvHeads) * headDim, heads * headStride);
    this.#sequences = sequences;
    // Only the queries: the new tokens' keys and values are read from the cache.
    const rows = sequences.flatMap(({ queries }) =>
      queries.map((query) => {
        const row = range(0, columns).map(() => NaN);
        query.forEach((values, head) => row.splice(head * headStride, headDim, ...Array.from(values)));
        return row;
      }),
    );

    const unused = range(0, kvHeads * Math.ceil(headDim / 2)).map(() => 0x7fc17fc1);
    const tables = scatteredPages(sequences.map((sequence) => Math.ceil(sequence.keys.length / PAGE_TOKENS)));
    const slots = tables.flat().length * PAGE_TOKENS;
    const keys: Matrix[number][] = range(0, slots).map(() => unused);
    const values: Matrix[number][] = range(0, slots).map(() => unused);
    sequences.forEach((sequence, index) => {
      const slotOf = (position: number) =>
        tables[index]![Math.floor(position / PAGE_TOKENS)]! * PAGE_TOKENS + (position % PAGE_TOKENS);
      // What lies before the first query's window stays NaN.
      const first = shape.window === undefined ? 0 : Math.max(0, sequence.begin + 1 - shape.window);
      for (let position = first; position < sequence.keys.length; position++) {
        keys[slotOf(position)] = cacheRow(sequence.keys[position]!);
        values[slotOf(position)] = cacheRow(sequence.values[position]!);
      }
    });
    this.#firstPages = tables.map((_, index) => tables.slice(0, index).flat().length);

    this.#operands = {
      qkv: bench.input(rows),
      keys: bench.input(keys, "u32"),
      values: bench.input(values, "u32"),
      pages: bench.input([tables.flat()], "u32"),
    };
    this.#constants = {
      HEAD_DIM: headDim,
      HEADS: heads,
      KV_HEADS: kvHeads,
      STRIDE: strideOf(columns, "f32"),
      HEAD_STRIDE: headStride,
      SCALE: scaleOf(shape),
      SOFTCAP: shape.softcap ?? 0,
      WINDOW: shape.window ?? 0,
    };
  }

  async prefill(cut: Cut): Promise<Matrix> {
    const { heads, headDim, memory = 32768 } = this.shape;
    const y = this.#output();
    const runs = this.#cut(cut);
    const part = prefillShape(headDim, memory, MOST_QUERIES);
    const constants = { ...this.#constants, ...part, STRIDE_OUT: y.stride };
    const parts = MOST_QUERIES / part.QUERIES;
    const bindings = { ...this.#operands, queries: this.bench.input(runs, "u32"), y };
    await this.bench.run(attentionPrefill, constants, bindings, { first_run: 0 }, { runs: runs.length, heads, parts });
    return this.bench.read(y);
  }

  async byLanes(cut: Cut, sharing: keyof typeof attentionLanes = "plain"): Promise<Matrix> {
    const y = this.#output();
    const runs = this.#cut(cut);
    const constants = { ...this.#constants, STRIDE_OUT: y.stride };
    const bindings = { ...this.#operands, queries: this.bench.input(runs, "u32"), y };
    const dims = { runs: runs.length, heads: this.shape.heads, most: MOST_QUERIES };
    await this.bench.run(attentionLanes[sharing], constants, bindings, { first_run: 0 }, dims);
    return this.bench.read(y);
  }

  async decode(): Promise<Matrix> {
    const { heads, headDim } = this.shape;
    const y = this.#output();
    const runs = this.#cut(SINGLE_QUERIES);
    const queries = this.bench.input(runs, "u32");
    const contextLength = Math.max(...this.#sequences.map(({ keys }) => keys.length));
    const chunks = chunksOf(contextLength);
    const partial = this.bench.output(1, runs.length * partialSize(heads, headDim, contextLength));
    const constants = { HEAD_DIM: headDim, HEADS: heads, WINDOW: this.shape.window ?? 0, STRIDE_OUT: y.stride };
    // In two rounds, as where not all have room at once.
    const half = Math.ceil(runs.length / 2);
    for (const first of [0, half]) {
      const dims = { runs: Math.min(half, runs.length - first), heads, chunks };
      const params = { chunks, first_run: first };
      await this.bench.run(attentionDecode, this.#constants, { ...this.#operands, queries, partial }, params, dims);
      await this.bench.run(attentionMerge, constants, { queries, partial, y }, params, dims);
    }
    return this.bench.read(y);
  }

  #output() {
    return this.bench.output(tokensOf(this.#sequences), this.shape.heads * this.shape.headDim);
  }

  /** [runs, 4]: first token, count, first position, first page. */
  #cut(cut: Cut): number[][] {
    const runs: number[][] = [];
    let firstToken = 0;
    this.#sequences.forEach(({ begin, queries }, index) => {
      let at = 0;
      for (let run = 0; at < queries.length; run++) {
        const count = Math.min(cut(run), queries.length - at);
        runs.push([firstToken + at, count, begin + at, this.#firstPages[index]!]);
        at += count;
      }
      firstToken += queries.length;
    });
    return runs;
  }
}
