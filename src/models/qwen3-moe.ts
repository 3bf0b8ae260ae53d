import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import { allLayers, decoder, DECODER_NAMES, preNormLayer, readShape, wireDecoder } from "./decoder.ts";
import { type MixtureConfig, mixtureMlp, readCounts } from "./experts.ts";
import { defineFamily } from "./family.ts";
import { sparseQwenLayers } from "./qwen2-moe.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Qwen 3 with experts (transformers, `models/qwen3_moe`). Its window, where it is used, is over all layers. */
export const qwen3Moe = defineFamily({
  modelType: "qwen3_moe",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): MixtureConfig {
    const shape = readShape(json, {
      vocabSize: 151936,
      hiddenSize: 2048,
      innerSize: 6144,
      layers: 24,
      heads: 32,
      kvHeads: 4,
      maxPositions: 32768,
    });
    const attentionBias = json.flag("attention_bias", false);
    const isSliding = json.flag("use_sliding_window", false);
    const window = isSliding ? json.countUnlessNull("sliding_window", 4096) : undefined;
    const experts = json.has("num_experts") ? "num_experts" : "num_local_experts";
    return {
      modelType: "qwen3_moe",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: attentionBias, output: attentionBias, mlp: false },
      qkNorm: true,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: allLayers(shape.layers, { rope: "all", window }),
      mixture: {
        ...readCounts(json, { experts, chosen: "num_experts_per_tok" }, [128, 8]),
        innerSize: json.count("moe_intermediate_size", 768),
        route: { score: "softmax", normalize: json.flag("norm_topk_prob", false), scale: 1 },
        isSparse: sparseQwenLayers(json, shape.layers),
      },
    };
  },

  modules: (config, options) =>
    decoder(config, options, (layer) => preNormLayer(config, layer, options, mixtureMlp(config, layer, options))),
  wire: (modules) => wireDecoder(modules),
});
