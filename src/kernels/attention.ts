import decodeSource from "../../shaders/attention_decode.wgsl" with { type: "text" };
import mergeSource from "../../shaders/attention_merge.wgsl" with { type: "text" };
import prefillSource from "../../shaders/attention_prefill.wgsl" with { type: "text" };
import operands from "../../shaders/lib/attention.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import queries from "../../shaders/lib/queries.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";

/** Keys that are taken together: `KEYS` in `lib/queries.wgsl`. */
const KEYS = 32;

/** Words of one entry of the `queries` table. */
export const QUERIES_WORDS = 4;

export const chunksOf = (contextLength: number): number => ceilDiv(contextLength, KEYS);

/** f32 values that `attention_decode` leaves per query for `attention_merge`. */
export const partialSize = (heads: number, headDim: number, contextLength: number): number =>
  heads * chunksOf(contextLength) * (headDim + 2);

export const attentionPrefill = defineKernel({
  name: "attention_prefill",
  source: [bf16, queries, operands, prefillSource],
  bindings: { queries: "read", qkv: "read", keys: "read", values: "read", y: "read_write" },
  constants: ["HEAD_DIM", "HEADS", "KV_HEADS", "STRIDE", "SCALE", "QUERIES", "STRIDE_OUT", "HEAD_WORDS"],
  params: {},
  workgroups: ({ runs, heads }: { runs: number; heads: number }) => [runs, heads, 1],
});

export const attentionDecode = defineKernel({
  name: "attention_decode",
  source: [bf16, queries, operands, decodeSource],
  bindings: { queries: "read", qkv: "read", keys: "read", values: "read", partial: "read_write" },
  constants: ["HEAD_DIM", "HEADS", "KV_HEADS", "STRIDE", "SCALE"],
  params: { chunks: "u32" },
  workgroups: ({ runs, heads, chunks }: { runs: number; heads: number; chunks: number }) => [runs, heads, chunks],
});

export const attentionMerge = defineKernel({
  name: "attention_merge",
  source: [queries, mergeSource],
  bindings: { queries: "read", partial: "read", y: "read_write" },
  constants: ["HEAD_DIM", "HEADS", "STRIDE_OUT"],
  params: { chunks: "u32" },
  workgroups: ({ runs, heads }: { runs: number; heads: number }) => [runs, heads, 1],
});
