import { strideOf } from "../gpu/tensor.ts";
import {
  attentionDecode,
  attentionMerge,
  attentionPrefill,
  chunksOf,
  kvWrite,
  partialSize,
  WORKGROUP,
} from "../kernels/index.ts";
import { type BuildContext, type ModuleSpec, temporary } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface AttentionSpec {
  /** Global index of the layer, which finds its cache. */
  layer: number;
  heads: number;
  kvHeads: number;
  headDim: number;
  /** Factor of q · k. */
  scale: number;
  maxContext: number;
  output: string;
}

/** Queries that one workgroup of `attention_prefill` takes through the keys together. */
export const PREFILL_QUERIES = 8;
/** A pass of up to this many single tokens spreads each one's keys over workgroups: the place for that is planned. */
export const DECODE_ROWS = 8;

/** 32-bit words of one token's keys (or values) in the cache. */
export const cacheWords = (kvHeads: number, headDim: number): number => kvHeads * Math.ceil(headDim / 2);

/**
 * Causal attention over qkv [tokens, (heads + 2 kvHeads) headDim]: the keys and values enter the layer's cache, and each
 * query sees the cache from its sequence's first token to its own.
 */
export function attention(spec: AttentionSpec): ModuleSpec<Attention> {
  const { heads, headDim, maxContext } = spec;
  return {
    weights: [],
    temporaries: [
      temporary(spec.output, heads * headDim),
      temporary("attention_partial", DECODE_ROWS * partialSize(heads, headDim, maxContext), { rows: 1 }),
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
    const { heads, kvHeads, headDim, layer } = this.spec;
    const { keys, values } = pass.cache(layer);
    const { table: queries, runs, isDecode, longestContext } = pass.attention;
    const y = pass.temporaries.get(this.spec.output);

    pass.commands.dispatch(
      this.pipelines.write,
      { qkv: qkv.tensor, slots: pass.slotTable, keys, values },
      {},
      { rows: qkv.rows, columns: cacheWords(kvHeads, headDim) },
    );
    if (isDecode) {
      const partial = pass.temporaries.get("attention_partial");
      const chunks = chunksOf(longestContext);
      const bindings = { queries, qkv: qkv.tensor, keys, values, partial };
      pass.commands.dispatch(this.pipelines.decode, bindings, { chunks }, { runs, heads, chunks });
      pass.commands.dispatch(this.pipelines.merge, { queries, partial, y }, { chunks }, { runs, heads });
    } else {
      pass.commands.dispatch(
        this.pipelines.prefill,
        { queries, qkv: qkv.tensor, keys, values, y },
        {},
        { runs, heads },
      );
    }
    return { tensor: y, rows: qkv.rows };
  }
}

async function pipelinesOf(spec: AttentionSpec, { pipelines }: BuildContext) {
  const { heads, kvHeads, headDim } = spec;
  const stride = strideOf((heads + 2 * kvHeads) * headDim, "f32");
  const strideOut = strideOf(heads * headDim, "f32");
  const shape = { HEAD_DIM: headDim, HEADS: heads, KV_HEADS: kvHeads, STRIDE: stride, SCALE: spec.scale };
  return {
    write: await pipelines.compile(kvWrite, {
      STRIDE: stride,
      KV_HEADS: kvHeads,
      HEAD_DIM: headDim,
      KEYS_AT: heads * headDim,
      VALUES_AT: (heads + kvHeads) * headDim,
      WORKGROUP,
    }),
    prefill: await pipelines.compile(attentionPrefill, {
      ...shape,
      QUERIES: PREFILL_QUERIES,
      STRIDE_OUT: strideOut,
      HEAD_WORDS: Math.ceil(headDim / 2),
    }),
    decode: await pipelines.compile(attentionDecode, shape),
    merge: await pipelines.compile(attentionMerge, { HEAD_DIM: headDim, HEADS: heads, STRIDE_OUT: strideOut }),
  };
}
