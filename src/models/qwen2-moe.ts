import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import {
  decoder,
  DECODER_NAMES,
  type LayerType,
  preNormLayer,
  readShape,
  readSliding,
  wireDecoder,
} from "./decoder.ts";
import { type MixtureConfig, mixtureMlp, readCounts } from "./experts.ts";
import { defineFamily } from "./family.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Qwen 2 and 1.5 with experts (transformers, `models/qwen2_moe`): one more expert is every token's, behind a gate. */
export const qwen2Moe = defineFamily({
  modelType: "qwen2_moe",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): MixtureConfig {
    const shape = readShape(json, {
      vocabSize: 151936,
      hiddenSize: 2048,
      innerSize: 5632,
      layers: 24,
      heads: 16,
      kvHeads: 16,
      maxPositions: 32768,
    });
    return {
      modelType: "qwen2_moe",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: json.flag("qkv_bias", true), output: false, mlp: false },
      qkNorm: false,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: windows(json, shape.layers),
      mixture: {
        ...readCounts(json, { experts: "num_experts", chosen: "num_experts_per_tok" }, [60, 4]),
        innerSize: json.count("moe_intermediate_size", 1408),
        route: { score: "softmax", normalize: json.flag("norm_topk_prob", false), scale: 1 },
        isSparse: sparseQwenLayers(json, shape.layers),
        shared: {
          innerSize: json.count("shared_expert_intermediate_size", 5632),
          isGated: true,
          name: "shared_expert",
        },
      },
    };
  },

  modules: (config, options) =>
    decoder(config, options, (layer) => preNormLayer(config, layer, options, mixtureMlp(config, layer, options))),
  wire: (modules) => wireDecoder(modules),
});

/** A window where `use_sliding_window` says so, on every other layer before `max_window_layers` unless `layer_types` says which. */
function windows(json: ConfigReader, layers: number): LayerType[] {
  const isUsed = json.flag("use_sliding_window", false);
  const window = isUsed ? json.countUnlessNull("sliding_window", 4096) : undefined;
  const end = json.wholeNumber("max_window_layers", 28);
  const sliding = readSliding(json, layers, window, (layer) => layer % 2 === 0 && layer < end);
  return sliding.map((slides) => ({ rope: "all", window: slides ? window : undefined }));
}

/** Which layers have experts: every `decoder_sparse_step`-th, but for those that `mlp_only_layers` names. */
export function sparseQwenLayers(json: ConfigReader, layers: number): boolean[] {
  const step = json.count("decoder_sparse_step", 1);
  const dense = new Set(json.wholeNumbers("mlp_only_layers"));
  return Array.from({ length: layers }, (_, layer) => !dense.has(layer) && (layer + 1) % step === 0);
}
