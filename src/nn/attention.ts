import { strideOf, type Tensor } from "../gpu/tensor.ts";
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
} from "../kernels/index.ts";
import type { HeadColumns, QkvLayout } from "./heads.ts";
import { type BuildContext, type ModuleSpec, temporary, type TemporarySpec } from "./module.ts";
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
  const { heads, kvHeads, headDim, layer } = spec;
  const { keys, values } = cacheLabels(layer);
  const cache = { rows: "slots", type: "u32" } as const;
  return {
    weights: [],
    temporaries: [
      temporary(spec.output, heads * headDim),
      ...attentionTemporaries(spec),
      temporary(keys, cacheWords(kvHeads, headDim), cache),
      temporary(values, cacheWords(kvHeads, headDim), cache),
    ],
    build: async (context) => new Attention(spec, await pipelinesOf(spec, context)),
  };
}

/** What `runAttention` needs beside its operands. */
export const attentionTemporaries = ({
  heads,
  headDim,
  maxContext,
}: Pick<AttentionSpec, "heads" | "headDim" | "maxContext">): TemporarySpec[] => {
  const singles = singlesIn(PARTIAL_BYTES / 4, heads, headDim, maxContext);
  return [temporary(PARTIAL, singles * partialSize(heads, headDim, maxContext), { rows: 1 })];
};

const PARTIAL = "attention_partial";

export class Attention {
  constructor(
    private readonly spec: AttentionSpec,
    private readonly pipelines: Awaited<ReturnType<typeof pipelinesOf>>,
  ) {}

  forward(pass: Pass, qkv: Activations): Activations {
    const { kvHeads, headDim } = this.spec;
    const labels = cacheLabels(this.spec.layer);
    const keys = pass.temporaries.get(labels.keys);
    const values = pass.temporaries.get(labels.values);
    const y = pass.temporaries.get(this.spec.output);
    pass.commands.dispatch(
      this.pipelines.write,
      { qkv: qkv.tensor, slots: pass.slotTable, keys, values },
      {},
      { rows: qkv.rows, columns: cacheWords(kvHeads, headDim) },
    );
    runAttention(pass, this.pipelines.attend, this.spec, { qkv: qkv.tensor, keys, values, y });
    return { tensor: y, rows: qkv.rows };
  }
}

type Operand = "qkv" | "keys" | "values" | "y";

/** Each query of the pass through its sequence's pages of the cache, where its own token is already. */
export function runAttention(
  pass: Pass,
  pipelines: AttentionPipelines,
  shape: { heads: number; headDim: number },
  { y, ...operands }: Record<Operand, Tensor>,
): void {
  const { queries, pages, runs, singles } = pass.attention;
  const cache = { queries, pages, ...operands };
  if ("lanes" in pipelines) {
    const of = (runs: number, most: number) => ({ runs, heads: shape.heads, most });
    pass.commands.dispatch(pipelines.lanes, { ...cache, y }, { first_run: 0 }, of(singles, 1));
    const rest = of(runs - singles, PREFILL_QUERIES);
    pass.commands.dispatch(pipelines.lanes, { ...cache, y }, { first_run: singles }, rest);
    return;
  }
  if (singles > 0) runSingles(pass, pipelines, shape, cache, y);
  const rest = { runs: runs - singles, heads: shape.heads, parts: pipelines.parts };
  pass.commands.dispatch(pipelines.prefill, { ...cache, y }, { first_run: singles }, rest);
}

function runSingles(
  pass: Pass,
  pipelines: GpuPipelines,
  { heads, headDim }: { heads: number; headDim: number },
  cache: Record<"queries" | "qkv" | "keys" | "values" | "pages", Tensor>,
  y: Tensor,
): void {
  const { singles, longestSingle } = pass.attention;
  const partial = pass.temporaries.get(PARTIAL);
  const chunks = chunksOf(longestSingle);
  const atATime = singlesIn(partial.columns, heads, headDim, longestSingle);
  for (let first = 0; first < singles; first += atATime) {
    const params = { chunks, first_run: first };
    const dims = { runs: Math.min(atATime, singles - first), heads, chunks };
    pass.commands.dispatch(pipelines.decode, { ...cache, partial }, params, dims);
    pass.commands.dispatch(pipelines.merge, { queries: cache.queries, partial, y }, params, dims);
  }
}

async function pipelinesOf(spec: AttentionSpec, context: BuildContext) {
  const { heads, kvHeads, headDim, layout, scale, window, softcap } = spec;
  const { columns, queries } = layout;
  return {
    write: await context.pipelines.compile(kvWrite, {
      STRIDE: strideOf(columns, "f32"),
      KV_HEADS: kvHeads,
      HEAD_DIM: headDim,
      HEAD_STRIDE: layout.keys.headStride,
      KEYS_AT: layout.keys.first,
      VALUES_AT: layout.values.first,
      WORKGROUP,
    }),
    attend: await attentionPipelines({ heads, kvHeads, headDim, columns, queries, scale, window, softcap }, context),
  };
}

interface AttentionShape extends Pick<AttentionSpec, "heads" | "kvHeads" | "headDim" | "scale" | "window" | "softcap"> {
  /** Of the rows that hold the queries, and where those lie. */
  columns: number;
  queries: HeadColumns;
}

/** One kernel on a device that is a CPU, three on others. All give the same bits. */
export type AttentionPipelines = { readonly lanes: Awaited<ReturnType<typeof lanesPipeline>> } | GpuPipelines;
type GpuPipelines = Awaited<ReturnType<typeof gpuPipelines>>;

export async function attentionPipelines(shape: AttentionShape, context: BuildContext): Promise<AttentionPipelines> {
  if (context.device.info.isSoftware) return { lanes: await lanesPipeline(shape, context) };
  return gpuPipelines(shape, context);
}

const lanesPipeline = (shape: AttentionShape, { pipelines, device }: BuildContext) =>
  pipelines.compile(attentionLanes[device.info.subgroupMinSize >= 8 ? "lanes8" : "plain"], {
    ...operandsOf(shape),
    STRIDE_OUT: strideOf(shape.heads * shape.headDim, "f32"),
  });

const operandsOf = ({ heads, kvHeads, headDim, columns, queries, scale, window = 0, softcap = 0 }: AttentionShape) => ({
  HEAD_DIM: headDim,
  HEADS: heads,
  KV_HEADS: kvHeads,
  STRIDE: strideOf(columns, "f32"),
  HEAD_STRIDE: queries.headStride,
  SCALE: scale,
  SOFTCAP: softcap,
  WINDOW: window,
});

async function gpuPipelines(shape: AttentionShape, { pipelines, device }: BuildContext) {
  const { heads, headDim, window = 0 } = shape;
  const strideOut = strideOf(heads * headDim, "f32");
  const operands = operandsOf(shape);
  const prefill = prefillShape(headDim, device.limits.maxComputeWorkgroupStorageSize, PREFILL_QUERIES);
  return {
    parts: PREFILL_QUERIES / prefill.QUERIES,
    prefill: await pipelines.compile(attentionPrefill, {
      ...operands,
      ...prefill,
      STRIDE_OUT: strideOut,
    }),
    decode: await pipelines.compile(attentionDecode, operands),
    merge: await pipelines.compile(attentionMerge, {
      HEAD_DIM: headDim,
      HEADS: heads,
      WINDOW: window,
      STRIDE_OUT: strideOut,
    }),
  };
}
