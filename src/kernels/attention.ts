import decodeSource from "../../shaders/attention_decode.wgsl" with { type: "text" };
import lanesSource from "../../shaders/attention_lanes.wgsl" with { type: "text" };
import mergeSource from "../../shaders/attention_merge.wgsl" with { type: "text" };
import prefillSource from "../../shaders/attention_prefill.wgsl" with { type: "text" };
import operands from "../../shaders/lib/attention.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import byEight from "../../shaders/lib/chunk_lanes8.wgsl" with { type: "text" };
import alone from "../../shaders/lib/chunk_plain.wgsl" with { type: "text" };
import softcap from "../../shaders/lib/softcap.wgsl" with { type: "text" };
import queries from "../../shaders/lib/queries.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";

/** Keys that are taken together, and the positions of a cache page: `KEYS` in `lib/queries.wgsl`. */
export const PAGE_TOKENS = 32;

/** Words of one entry of the `queries` table. */
export const QUERIES_WORDS = 4;

export const chunksOf = (contextLength: number): number => ceilDiv(contextLength, PAGE_TOKENS);

/** f32 values that `attention_decode` leaves per query for `attention_merge`. */
export const partialSize = (heads: number, headDim: number, contextLength: number): number =>
  heads * chunksOf(contextLength) * (headDim + 2);

/** How `attention_prefill` shares out workgroup memory: the most queries, and the largest slices, that fit into it. */
export function prefillShape(headDim: number, workgroupBytes: number, mostQueries: number) {
  const headWords = ceilDiv(headDim, 2);
  const sliceWords = Math.min(headWords, MOST_SLICE_WORDS);
  let queries = mostQueries;
  // Queries and outputs, a slice of the chunk, weights, four numbers for each query; some compilers round each of them up.
  const bytes = () => 4 * (2 * queries * headDim + PAGE_TOKENS * (sliceWords + queries) + 4 * queries) + 8 * 16;
  while (queries > 1 && bytes() > workgroupBytes) queries /= 2;
  return { QUERIES: queries, HEAD_WORDS: headWords, SLICE_WORDS: sliceWords };
}

const MOST_SLICE_WORDS = 64;

/** The overrides of `lib/attention.wgsl` and `lib/queries.wgsl`. */
const OPERANDS = ["HEAD_DIM", "HEADS", "KV_HEADS", "STRIDE", "HEAD_STRIDE", "SCALE", "SOFTCAP", "WINDOW"] as const;

export const attentionPrefill = defineKernel({
  name: "attention_prefill",
  source: [bf16, softcap, queries, operands, prefillSource],
  bindings: { queries: "read", qkv: "read", keys: "read", values: "read", pages: "read", y: "read_write" },
  constants: [...OPERANDS, "QUERIES", "STRIDE_OUT", "HEAD_WORDS", "SLICE_WORDS"],
  params: { first_run: "u32" },
  /** `parts`: of QUERIES each, in which a run of the most queries is taken. */
  workgroups: ({ runs, heads, parts }: { runs: number; heads: number; parts: number }) => [runs, heads, parts],
});

const lanes = (chunk: string) =>
  defineKernel({
    name: "attention_lanes",
    source: [chunk, bf16, softcap, queries, operands, lanesSource],
    bindings: { queries: "read", qkv: "read", keys: "read", values: "read", pages: "read", y: "read_write" },
    constants: [...OPERANDS, "STRIDE_OUT"],
    params: { first_run: "u32" },
    /** `most`: queries of a run. */
    workgroups: ({ runs, heads, most }: { runs: number; heads: number; most: number }) => [most, runs, heads],
  });

/** For subgroups of eight lanes or more, and for all others. */
export const attentionLanes = { lanes8: lanes(byEight), plain: lanes(alone) };

export const attentionDecode = defineKernel({
  name: "attention_decode",
  source: [bf16, softcap, queries, operands, decodeSource],
  bindings: { queries: "read", qkv: "read", keys: "read", values: "read", pages: "read", partial: "read_write" },
  constants: OPERANDS,
  params: { chunks: "u32", first_run: "u32" },
  workgroups: ({ runs, heads, chunks }: { runs: number; heads: number; chunks: number }) => [runs, heads, chunks],
});

export const attentionMerge = defineKernel({
  name: "attention_merge",
  source: [queries, mergeSource],
  bindings: { queries: "read", partial: "read", y: "read_write" },
  constants: ["HEAD_DIM", "HEADS", "WINDOW", "STRIDE_OUT"],
  params: { chunks: "u32", first_run: "u32" },
  workgroups: ({ runs, heads }: { runs: number; heads: number }) => [runs, heads, 1],
});
