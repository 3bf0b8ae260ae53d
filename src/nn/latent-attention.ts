import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { absorbQuery, expandValue, latentWrite, WORKGROUP } from "../kernels/index.ts";
import { attentionPipelines, attentionTemporaries, runAttention } from "./attention.ts";
import type { Matrix } from "./matrix.ts";
import { type BuildContext, matrixSpec, type ModuleSpec, temporary } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface LatentAttentionSpec {
  /** Global index of the layer, which names its cache. */
  layer: number;
  heads: number;
  /** Dimensions of a query that meet the key made of the latent, and those that are turned and meet the token's turned key. */
  plain: number;
  turned: number;
  /** Dimensions of a head's value. */
  value: number;
  /** Dimensions of the latent. */
  latent: number;
  /** Names of the matrix [heads (plain + value), latent]: per head the rows of its keys, then those of its values. */
  weight: readonly string[];
  /** Factor of q · k. */
  scale: number;
  maxContext: number;
  output: string;
}

/** The label under which a layer's cache is planned and found. */
export const latentLabel = (layer: number): string => `latents.${layer}`;

/**
 * Causal attention whose cache holds of each token its latent and its turned key alone, [slots, latent + turned] bfloat16
 * (DeepSeek-V2's MLA, with the matrices of keys and values taken to the other side: no key and no value is ever made).
 * Every head sees the same cache, so it is attention with one key head, whose values are the keys' first dimensions.
 */
export function latentAttention(spec: LatentAttentionSpec): ModuleSpec<LatentAttention> {
  const { heads, latent, plain, value } = spec;
  const columns = latent + spec.turned;
  const weight = matrixSpec(spec.weight, heads * (plain + value), latent, {
    quantizable: true,
    rowsTogether: plain + value,
  });
  return {
    weights: [weight],
    temporaries: [
      temporary(QUERIES, heads * columns),
      temporary(GATHERED, heads * columns),
      temporary(spec.output, heads * value),
      ...attentionTemporaries({ heads, headDim: columns, maxContext: spec.maxContext }),
      temporary(latentLabel(spec.layer), Math.ceil(columns / 2), { rows: "slots", type: "u32" }),
    ],
    async build(context) {
      const matrix = context.weights.matrix(weight);
      return new LatentAttention(spec, matrix, context.nothing, await pipelinesOf(spec, matrix, context));
    },
  };
}

const QUERIES = "latent_queries";
const GATHERED = "latent_gathered";

async function pipelinesOf(spec: LatentAttentionSpec, { encoding }: Matrix, context: BuildContext) {
  const { heads, plain, turned, value, latent } = spec;
  const columns = latent + turned;
  const wide = strideOf(heads * columns, "f32");
  const shape = {
    WEIGHT_STRIDE: strideOf(latent, "bf16"),
    COLUMNS: latent,
    PLAIN: plain,
    TURNED: turned,
    VALUE: value,
    LATENT: latent,
  };
  const { pipelines } = context;
  const queries = { first: 0, heads, headStride: columns };
  return {
    write: await pipelines.compile(latentWrite, { STRIDE: strideOf(columns, "f32"), COLUMNS: columns, WORKGROUP }),
    absorb: await pipelines.compile(absorbQuery[encoding], {
      ...shape,
      STRIDE: strideOf(heads * (plain + turned), "f32"),
      STRIDE_OUT: wide,
    }),
    attend: await attentionPipelines(
      { heads, kvHeads: 1, headDim: columns, columns: heads * columns, queries, scale: spec.scale },
      context,
    ),
    expand: await pipelines.compile(expandValue[encoding], {
      ...shape,
      STRIDE: wide,
      STRIDE_OUT: strideOf(heads * value, "f32"),
    }),
  };
}

export class LatentAttention {
  constructor(
    private readonly spec: LatentAttentionSpec,
    private readonly weight: Matrix,
    private readonly nothing: Tensor,
    private readonly pipelines: Awaited<ReturnType<typeof pipelinesOf>>,
  ) {}

  /** `q`: [tokens, heads (plain + turned)]; `latents`: [tokens, latent + turned], normed and turned. */
  forward(pass: Pass, { tensor: q, rows }: Activations, { tensor: latents }: Activations): Activations {
    const { commands, temporaries } = pass;
    const { heads, latent, turned, value } = this.spec;
    const columns = latent + turned;
    const cache = temporaries.get(latentLabel(this.spec.layer));
    const [queries, gathered, y] = [QUERIES, GATHERED, this.spec.output].map((label) => temporaries.get(label));

    const dims = { rows, columns: cache.columns };
    commands.dispatch(this.pipelines.write, { x: latents, slots: pass.slotTable, cache }, {}, dims);
    this.#withWeight((operands, params, heads) =>
      commands.dispatch(
        this.pipelines.absorb,
        { ...operands, q, y: queries! },
        { ...params, rows },
        { rows, heads, latent },
      ),
    );
    // The values are the keys' own dimensions. What is gathered of the turned ones behind them nobody reads.
    const operands = { qkv: queries!, keys: cache, values: cache, y: gathered! };
    runAttention(pass, this.pipelines.attend, { heads, headDim: columns }, operands);
    this.#withWeight((operands, params, heads) =>
      commands.dispatch(
        this.pipelines.expand,
        { ...operands, x: gathered!, y: y! },
        { ...params, rows },
        { rows, heads, value },
      ),
    );
    return { tensor: y!, rows };
  }

  /** Part by part, each of some whole heads. */
  #withWeight(
    dispatch: (operands: { weight: Tensor; scales: Tensor }, params: { first_head: number }, heads: number) => void,
  ): void {
    const rowsOfHead = this.spec.plain + this.spec.value;
    for (const { firstRow, rows, tensor, scales = this.nothing } of this.weight.parts) {
      dispatch({ weight: tensor, scales }, { first_head: firstRow / rowsOfHead }, rows / rowsOfHead);
    }
  }
}
