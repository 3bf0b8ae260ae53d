import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import { allLayers, decoder, DECODER_NAMES, preNormLayer, readShape, wireDecoder } from "./decoder.ts";
import { type MixtureConfig, mixtureMlp, readCounts } from "./experts.ts";
import { defineFamily } from "./family.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** w1 is the gate, w3 what it opens, w2 the way back. */
const NAMES = { module: "block_sparse_moe", gate: "w1", up: "w3", down: "w2" };

/** Mixtral (transformers, `models/mixtral`): Mistral without a window, with experts in every layer. */
export const mixtral = defineFamily({
  modelType: "mixtral",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): MixtureConfig {
    const shape = readShape(json, {
      vocabSize: 32000,
      hiddenSize: 4096,
      innerSize: 14336,
      layers: 32,
      heads: 32,
      kvHeads: 8,
      maxPositions: 4096 * 32,
    });
    const keys = { experts: "num_local_experts", chosen: "num_experts_per_tok" };
    return {
      modelType: "mixtral",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-5), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: false, output: false, mlp: false },
      qkNorm: false,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json, 1e6) }) }),
      layerTypes: allLayers(shape.layers, { rope: "all", window: json.countUnlessNull("sliding_window", undefined) }),
      mixture: {
        ...readCounts(json, keys, [8, 2]),
        innerSize: shape.innerSize,
        route: { score: "softmax", normalize: true, scale: 1 },
        isSparse: Array.from({ length: shape.layers }, () => true),
      },
    };
  },

  modules: (config, options) =>
    decoder(config, options, (layer) =>
      preNormLayer(config, layer, options, mixtureMlp(config, layer, options, NAMES)),
    ),
  wire: (modules) => wireDecoder(modules),
});
