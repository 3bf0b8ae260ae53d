import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import { decoder, DECODER_NAMES, type DecoderConfig, preNormLayer, readShape, wireDecoder } from "./decoder.ts";
import { defineFamily } from "./family.ts";
import { qwenLayers } from "./qwen2.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Qwen 3 (transformers, `models/qwen3`): Llama with norms over the heads of q and k, before they are turned. */
export const qwen3 = defineFamily({
  modelType: "qwen3",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): DecoderConfig {
    const shape = readShape(json, {
      vocabSize: 151936,
      hiddenSize: 4096,
      innerSize: 22016,
      layers: 32,
      heads: 32,
      kvHeads: 32,
      headDim: 128,
      maxPositions: 32768,
    });
    const attentionBias = json.flag("attention_bias", false);
    return {
      modelType: "qwen3",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: attentionBias, output: attentionBias, mlp: false },
      qkNorm: true,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: qwenLayers(json, shape.layers),
    };
  },

  modules: (config, options) => decoder(config, options, (layer) => preNormLayer(config, layer, options)),
  wire: (modules) => wireDecoder(modules),
});
