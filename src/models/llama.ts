import type { ConfigReader } from "./config.ts";
import {
  allLayers,
  decoder,
  DECODER_NAMES,
  type DecoderConfig,
  preNormLayer,
  readShape,
  wireDecoder,
} from "./decoder.ts";
import { defineFamily } from "./family.ts";
import { readActivation } from "./activation.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Llama 1 to 3 (transformers, `models/llama`): RMS norms before, rotary positions, grouped key heads, a gated MLP. */
export const llama = defineFamily({
  modelType: "llama",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): DecoderConfig {
    const shape = readShape(json, {
      vocabSize: 32000,
      hiddenSize: 4096,
      innerSize: 11008,
      layers: 32,
      heads: 32,
      maxPositions: 2048,
    });
    const attentionBias = json.flag("attention_bias", false);
    return {
      modelType: "llama",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: attentionBias, output: attentionBias, mlp: json.flag("mlp_bias", false) },
      qkNorm: false,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: allLayers(shape.layers, { rope: "all" }),
    };
  },

  modules: (config, options) => decoder(config, options, (layer) => preNormLayer(config, layer, options)),
  wire: (modules) => wireDecoder(modules),
});
