import { readActivation } from "./activation.ts";
import type { ConfigReader } from "./config.ts";
import {
  decoder,
  DECODER_NAMES,
  type DecoderConfig,
  type LayerType,
  preNormLayer,
  readShape,
  readSliding,
  wireDecoder,
} from "./decoder.ts";
import { defineFamily } from "./family.ts";
import { readRope, ropeKeys, ropeParameters, withRopes } from "./rope.ts";

/** Qwen 2 and 2.5 (transformers, `models/qwen2`): Llama with biases on q, k and v, and perhaps a window on the later layers. */
export const qwen2 = defineFamily({
  modelType: "qwen2",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): DecoderConfig {
    const shape = readShape(json, {
      vocabSize: 151936,
      hiddenSize: 4096,
      innerSize: 22016,
      layers: 32,
      heads: 32,
      kvHeads: 32,
      maxPositions: 32768,
    });
    return {
      modelType: "qwen2",
      ...shape,
      activation: readActivation(json, "hidden_act", "silu"),
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 0 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: 1,
      bias: { qkv: true, output: false, mlp: false },
      qkNorm: false,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: qwenLayers(json, shape.layers),
    };
  },

  modules: (config, options) => decoder(config, options, (layer) => preNormLayer(config, layer, options)),
  wire: (modules) => wireDecoder(modules),
});

/** A window only where `use_sliding_window` says so, on the layers from `max_window_layers` on unless `layer_types` says which. */
export function qwenLayers(json: ConfigReader, layers: number): LayerType[] {
  const used = json.flag("use_sliding_window", false);
  const window = used ? json.countUnlessNull("sliding_window", 4096) : undefined;
  const first = json.wholeNumber("max_window_layers", 28);
  const sliding = readSliding(json, layers, window, (layer) => window !== undefined && layer >= first);
  return sliding.map((slides) => ({ rope: "all", window: slides ? window : undefined }));
}
