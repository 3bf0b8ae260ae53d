import { headNorm, latentAttention, linear, type ModuleSpec, rmsNorm, rope, type RouteSpec } from "../nn/index.ts";
import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import {
  allLayers,
  decoder,
  DECODER_NAMES,
  MOST_HEAD_DIM,
  preNormLayer,
  readShape,
  ropeTableOf,
  wireDecoder,
} from "./decoder.ts";
import { EXPERT_NAMES, type MixtureConfig, mixtureMlp, readCounts } from "./experts.ts";
import { defineFamily, type StageOptions } from "./family.ts";
import { type Rope, readRope, ropeKeys, ropeParameters, withRopes, yarnScale } from "./rope.ts";
import { type Block, block } from "./tree.ts";

// DeepSeek-V2 and V3 (transformers, `models/deepseek_v2` and `deepseek_v3`): attention over compressed keys and values
// (MLA), experts in groups, further layers that guess at the tokens behind the next, which nobody needs here.

interface DeepseekConfig extends MixtureConfig {
  /** Of the compressed queries; undefined: they are not compressed. */
  readonly queryRank?: number;
  readonly latent: number;
  readonly plain: number;
  readonly turned: number;
  readonly value: number;
  readonly interleaved: boolean;
  readonly attentionBias: boolean;
  /** The name of the experts' correction bias; V2 has none. */
  readonly correction?: string;
}

interface Defaults {
  vocabSize: number;
  hiddenSize: number;
  innerSize: number;
  layers: number;
  heads: number;
  kvHeads?: number;
  maxPositions: number;
  experts: number;
  chosen?: number;
  expertSize: number;
  shared: number;
  dense: number;
  scale: number;
}

export const deepseekV2 = family("deepseek_v2", {
  defaults: {
    vocabSize: 102400,
    hiddenSize: 4096,
    innerSize: 11008,
    layers: 32,
    heads: 32,
    maxPositions: 2048,
    experts: 64,
    expertSize: 1407,
    shared: 2,
    dense: 0,
    scale: 1,
  },
  readRoute(json, experts) {
    refuseOthers(json, "scoring_func", "softmax");
    const method = json.text("topk_method", "greedy");
    const route = { score: "softmax", normalize: false } as const; // norm_topk_prob is read by nobody
    if (method === "greedy") return route;
    if (method === "group_limited_greedy") return { ...route, groups: readGroups(json, experts, 1) };
    throw json.refuse(
      `topk_method "${method}" is not one that meshnet knows for deepseek_v2`,
      "known are greedy, group_limited_greedy",
    );
  },
  readInterleaved: () => true,
});

export const deepseekV3 = family("deepseek_v3", {
  defaults: {
    vocabSize: 129280,
    hiddenSize: 7168,
    innerSize: 18432,
    layers: 61,
    heads: 128,
    kvHeads: 128,
    maxPositions: 4096,
    experts: 256,
    chosen: 8,
    expertSize: 2048,
    shared: 1,
    dense: 3,
    scale: 2.5,
  },
  readRoute(json, experts) {
    refuseOthers(json, "scoring_func", "sigmoid");
    refuseOthers(json, "topk_method", "noaux_tc");
    const groups = readGroups(json, experts, 2, { count: 8, chosen: 4 });
    return { score: "sigmoid", normalize: json.flag("norm_topk_prob", true), groups };
  },
  correction: "gate.e_score_correction_bias",
  readInterleaved: (json) => json.flag("rope_interleave", true),
});

interface Variant {
  defaults: Defaults;
  readRoute: (json: ConfigReader, experts: Counts) => Pick<RouteSpec, "score" | "normalize" | "groups">;
  correction?: string;
  readInterleaved: (json: ConfigReader) => boolean;
}

type Counts = { experts: number; chosen: number };

function family(modelType: string, variant: Variant) {
  return defineFamily({
    modelType,
    ...DECODER_NAMES,
    mayHaveMoreLayers: true,
    parseConfig: (json: ConfigReader): DeepseekConfig => parseConfig(modelType, json, variant),
    modules: (config, options) =>
      decoder(config, options, (layer) =>
        preNormLayer(
          config,
          layer,
          options,
          mixtureMlp(config, layer, options, { ...EXPERT_NAMES, bias: config.correction }),
          compressedAttention(config, layer, options),
        ),
      ),
    wire: (modules) => wireDecoder(modules),
  });
}

function parseConfig(modelType: string, json: ConfigReader, variant: Variant): DeepseekConfig {
  const { defaults, correction } = variant;
  const plain = json.count("qk_nope_head_dim", 128);
  const turned = json.count("qk_rope_head_dim", 64);
  const latent = json.count("kv_lora_rank", 512);
  if (latent + turned > MOST_LATENT) {
    throw json.refuse(
      `kv_lora_rank ${latent} and qk_rope_head_dim ${turned} are ${latent + turned} dimensions, and meshnet takes up to ${MOST_LATENT}`,
      "use another model",
    );
  }
  refuseOthers(json, "moe_layer_freq", 1);
  // A `head_dim` of the file is that of the turned part, as transformers has it.
  const shape = { ...readShape(json.without("head_dim"), { ...defaults, headDim: Math.min(turned, MOST_HEAD_DIM) }) };
  const turns = readRope(ropeParameters(json), { ...shape, headDim: turned, ...ropeKeys(json) });
  const attentionBias = json.flag("attention_bias", false);
  const counts = readCounts(json, { experts: "n_routed_experts", chosen: "num_experts_per_tok" }, [
    defaults.experts,
    defaults.chosen,
  ]);
  const expertSize = json.count("moe_intermediate_size", defaults.expertSize);
  const firstSparse = json.wholeNumber("first_k_dense_replace", defaults.dense);
  return {
    modelType,
    ...shape,
    activation: readActivation(json, "hidden_act", "silu"),
    norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
    attentionScale: (plain + turned) ** -0.5 * scoreFactor(turns, ropeParameters(json)),
    embedScale: 1,
    bias: { qkv: false, output: attentionBias, mlp: modelType === "deepseek_v2" && json.flag("mlp_bias", false) },
    qkNorm: false,
    fused: false,
    ...withRopes({ all: turns }),
    layerTypes: allLayers(shape.layers, { rope: "all" }),
    mixture: {
      ...counts,
      innerSize: expertSize,
      route: { ...variant.readRoute(json, counts), scale: json.positive("routed_scaling_factor", defaults.scale) },
      isSparse: Array.from({ length: shape.layers }, (_, layer) => layer >= firstSparse),
      shared: {
        innerSize: expertSize * json.count("n_shared_experts", defaults.shared),
        isGated: false,
        name: "shared_experts",
      },
    },
    queryRank: json.countUnlessNull("q_lora_rank", 1536),
    latent,
    plain,
    turned,
    value: json.count("v_head_dim", 128),
    interleaved: variant.readInterleaved(json),
    attentionBias,
    correction,
  };
}

/** What `attention_prefill` has room for, with one query at a time in 16 KiB of workgroup memory. */
const MOST_LATENT = 768;

/** Of these two no other value is known; checkpoints without the key mean it. */
function refuseOthers(json: ConfigReader, key: string, known: string | number): void {
  const value = json.raw(key);
  if (value === undefined || value === null || value === known) return;
  throw json.refuse(`${key} is ${JSON.stringify(value)}, which meshnet does not know`, `known is ${known}`);
}

function readGroups(
  json: ConfigReader,
  { experts, chosen }: Counts,
  best: 1 | 2,
  defaults?: { count: number; chosen: number },
): NonNullable<RouteSpec["groups"]> {
  const groups = {
    count: json.count("n_group", defaults?.count),
    chosen: json.count("topk_group", defaults?.chosen),
    best,
  };
  const size = experts / groups.count;
  const hint = "use the config.json that belongs to the model";
  if (!Number.isInteger(size) || size < best) {
    throw json.refuse(`${experts} experts cannot be in ${groups.count} groups of at least ${best}`, hint);
  }
  if (groups.chosen > groups.count || groups.chosen * size < chosen) {
    throw json.refuse(`${chosen} experts cannot be chosen from ${groups.chosen} of ${groups.count} groups`, hint);
  }
  return groups;
}

/** With scaled positions scores are larger by m², where the file gives `mscale_all_dim`. */
function scoreFactor({ scaling }: Rope, parameters: ConfigReader): number {
  const allDim = parameters.has("mscale_all_dim") ? parameters.number("mscale_all_dim") : 0;
  if (scaling.type === "default" || allDim === 0) return 1;
  return yarnScale(parameters.positive("factor"), allDim) ** 2;
}

/** transformers gives these two norms no epsilon: they have their class's. */
const LATENT_EPS = 1e-6;

/** Normed rows to what is added to the stream, through a cache of latents. */
function compressedAttention(config: DeepseekConfig, layer: number, options: StageOptions): ModuleSpec<Block> {
  const { hiddenSize, heads, latent, plain, turned, value, queryRank, interleaved, attentionBias } = config;
  const { maxContext, int8Activations } = options;
  const name = `layers.${layer}.self_attn`;
  const queryColumns = heads * (plain + turned);
  const project = (part: string, inSize: number, out: number, output: string, hasBias = false) =>
    linear({
      weight: [`${name}.${part}.weight`],
      bias: hasBias ? `${name}.${part}.bias` : undefined,
      in: inSize,
      out,
      output,
      int8Activations,
    });
  const turn = (columns: number, first: number, count: number, headStride: number) =>
    rope({
      table: ropeTableOf(config, "all"),
      columns,
      places: [{ first, heads: count, headStride }],
      interleaved,
    });
  return block(
    {
      compressQuery:
        queryRank === undefined ? undefined : project("q_a_proj", hiddenSize, queryRank, "query_rank", attentionBias),
      normQuery:
        queryRank === undefined
          ? undefined
          : rmsNorm({
              name: `${name}.q_a_layernorm`,
              eps: LATENT_EPS,
              offset: 0,
              columns: queryRank,
              output: "query_normed",
            }),
      query:
        queryRank === undefined
          ? project("q_proj", hiddenSize, queryColumns, "queries_of_heads")
          : project("q_b_proj", queryRank, queryColumns, "queries_of_heads"),
      turnQuery: turn(queryColumns, plain, heads, plain + turned),
      compress: project("kv_a_proj_with_mqa", hiddenSize, latent + turned, "latent", attentionBias),
      normLatent: headNorm({
        name: `${name}.kv_a_layernorm`,
        eps: LATENT_EPS,
        offset: 0,
        headDim: latent,
        columns: latent + turned,
        place: { first: 0, heads: 1, headStride: latent },
      }),
      turnKey: turn(latent + turned, latent, 1, turned),
      attend: latentAttention({
        layer,
        heads,
        plain,
        turned,
        value,
        latent,
        weight: [`${name}.kv_b_proj.weight`],
        scale: config.attentionScale,
        maxContext,
        output: "attended",
      }),
      output: project("o_proj", heads * value, hiddenSize, "projected", attentionBias),
    },
    ({ compressQuery, normQuery, query, turnQuery, compress, normLatent, turnKey, attend, output }) =>
      (pass, x) => {
        const toQuery = compressQuery && normQuery ? normQuery.forward(pass, compressQuery.forward(pass, x)) : x;
        const q = turnQuery.forward(pass, query.forward(pass, toQuery));
        const latents = turnKey.forward(pass, normLatent.forward(pass, compress.forward(pass, x)));
        return output.forward(pass, attend.forward(pass, q, latents));
      },
  );
}
