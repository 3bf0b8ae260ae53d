import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import {
  decoder,
  DECODER_NAMES,
  type DecoderConfig,
  readShape,
  readSliding,
  sandwichLayer,
  wireDecoder,
} from "./decoder.ts";
import { defineFamily } from "./family.ts";
import { gemmaEmbedScale, refuseBidirectional } from "./gemma.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Gemma 2 (transformers, `models/gemma2`): norms on both sides, soft caps, a window on every other layer. */
export const gemma2 = defineFamily({
  modelType: "gemma2",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): DecoderConfig {
    refuseBidirectional(json);
    const shape = readShape(json, {
      vocabSize: 256000,
      hiddenSize: 2304,
      innerSize: 9216,
      layers: 26,
      heads: 8,
      kvHeads: 4,
      headDim: 256,
      maxPositions: 8192,
      tied: true,
    });
    const attentionBias = json.flag("attention_bias", false);
    const window = json.countUnlessNull("sliding_window", 4096);
    return {
      modelType: "gemma2",
      ...shape,
      activation: readActivation(json, "hidden_activation", "gelu_pytorch_tanh"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 1 },
      attentionScale: json.positive("query_pre_attn_scalar", 256) ** -0.5,
      attentionSoftcap: json.positiveUnlessNull("attn_logit_softcapping", 50),
      logitSoftcap: json.positiveUnlessNull("final_logit_softcapping", 30),
      embedScale: gemmaEmbedScale(shape.hiddenSize),
      bias: { qkv: attentionBias, output: attentionBias, mlp: false },
      qkNorm: false,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: readSliding(json, shape.layers, window, (layer) => layer % 2 === 0).map((slides) => ({
        rope: "all",
        window: slides ? window : undefined,
      })),
    };
  },

  modules: (config, options) => decoder(config, options, (layer) => sandwichLayer(config, layer, options)),
  wire: (modules) => wireDecoder(modules),
});
