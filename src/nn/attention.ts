import { strideOf, type Tensor } from "../gpu/tensor.ts";
import {
  attentionDecode,
  attentionMerge,
  attentionPrefill,
  chunksOf,
  kvWrite,
  PAGE_TOKENS,
  partialSize,
  prefillShape,
  WORKGROUP,
} from "../kernels/index.ts";
import type { QkvLayout } from "./heads.ts";
import { type BuildContext, type ModuleSpec, temporary } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface AttentionSpec {
  /** Global index of the layer, which names its cache. */
  layer: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  /** Where a row of qkv holds which. */
  layout: QkvLayout;
  /** Factor of q · k. */
  scale: number;
  /** Of the scaled scores: cap · tanh(score / cap). */
  softcap?: number;
  /** Keys that a query sees, its own token's included. Default: all before it. */
  window?: number;
  maxContext: number;
  output: string;
}

/** The most queries that one workgroup of `attention_prefill` takes through the keys together: a run of the tables. */
export const PREFILL_QUERIES = 8;
/** Single tokens have their keys spread over workgroups, as many tokens at a time as this has room for. */
const PARTIAL_BYTES = 32 * 2 ** 20;
/** The most at a time, where contexts are short. */
const MAX_SINGLES = 64;

/** Tokens of a context of this length whose chunks have room in `words` float32 values, at least 1. */
const singlesIn = (words: number, heads: number, headDim: number, context: number): number =>
  Math.max(1, Math.min(MAX_SINGLES, Math.floor(words / partialSize(heads, headDim, context))));

/** The labels under which a layer's cache is planned and found. */
export const cacheLabels = (layer: number) => ({ keys: `keys.${layer}`, values: `values.${layer}` });

/** Tokens of a cache page. */
export { PAGE_TOKENS };

/** 32-bit words of one token's keys (or values) in the cache. */
export const cacheWords = (kvHeads: number, headDim: number): number => kvHeads * Math.ceil(headDim / 2);

/**
 * Causal attention over qkv [tokens, layout.columns]: the keys and values enter the layer's cache [slots,
 * kvHeads headDim] bfloat16, two to a word, and each query sees its sequence's pages of it from the first token to its own.
 */
export function attention(spec: AttentionSpec): ModuleSpec<Attention> {
  const { heads, kvHeads, headDim, maxContext, layer } = spec;
  const { keys, values } = cacheLabels(layer);
  const singles = singlesIn(PARTIAL_BYTES / 4, heads, headDim, maxContext);
  const cache = { rows: "slots", type: "u32" } as const;
  return {
    weights: [],
    temporaries: [
      temporary(spec.output, heads * headDim),
      temporary("attention_partial", singles * partialSize(heads, headDim, maxContext), { rows: 1 }),
      temporary(keys, cacheWords(kvHeads, headDim), cache),
      temporary(values, cacheWords(kvHeads, headDim), cache),
    ],
    build: async (context) => new Attention(spec, await pipelinesOf(spec, context)),
  };
}

export class Attention {
  constructor(
    private readonly spec: AttentionSpec,
    private readonly pipelines: Awaited<ReturnType<typeof pipelinesOf>>,
  ) {}

  forward(pass: Pass, qkv: Activations): Activations {
    const { heads, kvHeads, headDim } = this.spec;
    const labels = cacheLabels(this.spec.layer);
    const keys = pass.temporaries.get(labels.keys);
    const values = pass.temporaries.get(labels.values);
    const y = pass.temporaries.get(this.spec.output);
    const { queries, pages, runs, singles } = pass.attention;

    pass.commands.dispatch(
      this.pipelines.write,
      { qkv: qkv.tensor, slots: pass.slotTable, keys, values },
      {},
      { rows: qkv.rows, columns: cacheWords(kvHeads, headDim) },
    );
    const cache = { queries, qkv: qkv.tensor, keys, values, pages };
    if (singles > 0) this.#decode(pass, cache, y);
    const rest = { runs: runs - singles, heads, parts: this.pipelines.parts };
    pass.commands.dispatch(this.pipelines.prefill, { ...cache, y }, { first_run: singles }, rest);
    return { tensor: y, rows: qkv.rows };
  }

  #decode(pass: Pass, cache: Record<"queries" | "qkv" | "keys" | "values" | "pages", Tensor>, y: Tensor): void {
    const { heads, headDim } = this.spec;
    const { singles, longestSingle } = pass.attention;
    const partial = pass.temporaries.get("attention_partial");
    const chunks = chunksOf(longestSingle);
    const atATime = singlesIn(partial.columns, heads, headDim, longestSingle);
    for (let first = 0; first < singles; first += atATime) {
      const params = { chunks, first_run: first };
      const dims = { runs: Math.min(atATime, singles - first), heads, chunks };
      pass.commands.dispatch(this.pipelines.decode, { ...cache, partial }, params, dims);
      pass.commands.dispatch(this.pipelines.merge, { queries: cache.queries, partial, y }, params, dims);
    }
  }
}

async function pipelinesOf(spec: AttentionSpec, { pipelines, device }: BuildContext) {
  const { heads, kvHeads, headDim, layout, window = 0, softcap = 0 } = spec;
  const stride = strideOf(layout.columns, "f32");
  const strideOut = strideOf(heads * headDim, "f32");
  const shape = {
    HEAD_DIM: headDim,
    HEADS: heads,
    KV_HEADS: kvHeads,
    STRIDE: stride,
    HEAD_STRIDE: layout.queries.headStride,
    SCALE: spec.scale,
    SOFTCAP: softcap,
    WINDOW: window,
  };
  const prefill = prefillShape(headDim, device.limits.maxComputeWorkgroupStorageSize, PREFILL_QUERIES);
  return {
    parts: PREFILL_QUERIES / prefill.QUERIES,
    write: await pipelines.compile(kvWrite, {
      STRIDE: stride,
      KV_HEADS: kvHeads,
      HEAD_DIM: headDim,
      HEAD_STRIDE: layout.keys.headStride,
      KEYS_AT: layout.keys.first,
      VALUES_AT: layout.values.first,
      WORKGROUP,
    }),
    prefill: await pipelines.compile(attentionPrefill, {
      ...shape,
      ...prefill,
      STRIDE_OUT: strideOut,
    }),
    decode: await pipelines.compile(attentionDecode, shape),
    merge: await pipelines.compile(attentionMerge, {
      HEAD_DIM: headDim,
      HEADS: heads,
      WINDOW: window,
      STRIDE_OUT: strideOut,
    }),
  };
}
