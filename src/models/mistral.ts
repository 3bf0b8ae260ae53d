import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import {
  decoder,
  DECODER_NAMES,
  type DecoderConfig,
  preNormLayer,
  readShape,
  readSliding,
  wireDecoder,
} from "./decoder.ts";
import { defineFamily } from "./family.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/**
 * Mistral (transformers, `models/mistral`): Llama, with a window unless the file says `null`, over all layers unless
 * `layer_types` says which. A file with that key transformers loads as Ministral, whatever it calls itself.
 */
export const mistral = mistralOf("mistral");
/** Ministral (transformers, `models/ministral`). */
export const ministral = mistralOf("ministral");

function mistralOf(modelType: string) {
  return defineFamily({
    modelType,
    ...DECODER_NAMES,
    parseConfig: (json: ConfigReader): DecoderConfig => ({ ...readMistral(json), modelType }),
    modules: (config, options) => decoder(config, options, (layer) => preNormLayer(config, layer, options)),
    wire: (modules) => wireDecoder(modules),
  });
}

function readMistral(json: ConfigReader): DecoderConfig {
  const shape = readShape(json, {
    vocabSize: 32000,
    hiddenSize: 4096,
    innerSize: 14336,
    layers: 32,
    heads: 32,
    kvHeads: 8,
    maxPositions: 4096 * 32,
  });
  const window = json.countUnlessNull("sliding_window", 4096);
  return {
    modelType: "mistral",
    ...shape,
    activation: readActivation(json, "hidden_act", "silu"),
    norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
    attentionScale: shape.headDim ** -0.5,
    embedScale: 1,
    bias: { qkv: false, output: false, mlp: false },
    qkNorm: false,
    fused: false,
    ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
    layerTypes: readSliding(json, shape.layers, window, () => true).map((slides) => ({
      rope: "all",
      window: slides ? window : undefined,
    })),
  };
}
