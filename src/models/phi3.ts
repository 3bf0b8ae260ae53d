import { readActivation } from "./activation.ts";
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
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Phi-3 and Phi-4 (transformers, `models/phi3`): Llama with fused projections, perhaps partly turned heads, and longrope. */
export const phi3 = defineFamily({
  modelType: "phi3",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): DecoderConfig {
    const shape = readShape(json, {
      vocabSize: 32064,
      hiddenSize: 3072,
      innerSize: 8192,
      layers: 32,
      heads: 32,
      maxPositions: 4096,
    });
    return {
      modelType: "phi3",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-5), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: false, output: false, mlp: false },
      qkNorm: false,
      fused: true,
      ...withRopes({
        all: readRope(ropeParameters(json), {
          ...shape,
          ...ropeKeys(json),
          partialByDefault: true,
          trained: json.count("original_max_position_embeddings", 4096),
          types: ["default", "longrope"],
          aliases: { su: "longrope", yarn: "longrope" },
        }),
      }),
      layerTypes: allLayers(shape.layers, { rope: "all", window: json.countUnlessNull("sliding_window", undefined) }),
    };
  },

  modules: (config, options) => decoder(config, options, (layer) => preNormLayer(config, layer, options)),
  wire: (modules) => wireDecoder(modules),
});
