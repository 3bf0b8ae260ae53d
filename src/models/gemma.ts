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

/** Gemma 1 (transformers, `models/gemma`): Llama with norms by 1 + weight, a scaled embedding, a gated gelu. */
export const gemma = defineFamily({
  modelType: "gemma",
  ...DECODER_NAMES,

  parseConfig(json: ConfigReader): DecoderConfig {
    refuseBidirectional(json);
    const shape = readShape(json, {
      vocabSize: 256000,
      hiddenSize: 3072,
      innerSize: 24576,
      layers: 28,
      heads: 16,
      kvHeads: 16,
      headDim: 256,
      maxPositions: 8192,
      tied: true,
    });
    const attentionBias = json.flag("attention_bias", false);
    const activation = readActivation(json, "hidden_act", "gelu_pytorch_tanh");
    return {
      modelType: "gemma",
      ...shape,
      activation: activation === "gelu_erf" ? "gelu_tanh" : activation, // `gelu` in the first files meant the other one
      norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 1 },
      attentionScale: shape.headDim ** -0.5,
      embedScale: gemmaEmbedScale(shape.hiddenSize),
      bias: { qkv: attentionBias, output: attentionBias, mlp: false },
      qkNorm: false,
      fused: false,
      ...withRopes({ all: readRope(ropeParameters(json), { ...shape, ...ropeKeys(json) }) }),
      layerTypes: allLayers(shape.layers, { rope: "all" }),
    };
  },

  modules: (config, options) => decoder(config, options, (layer) => preNormLayer(config, layer, options)),
  wire: (modules) => wireDecoder(modules),
});

/** √hidden as bfloat16: √3072 is 55.5. The models were trained that way (transformers pull request 29402). */
export function gemmaEmbedScale(hiddenSize: number): number {
  const bits = new Uint32Array(Float32Array.of(Math.sqrt(hiddenSize)).buffer);
  bits[0] = (bits[0]! + 0x7fff + ((bits[0]! >>> 16) & 1)) & 0xffff0000;
  return new Float32Array(bits.buffer)[0]!;
}

/** Encoders made of Gemma let every token see every other one. */
export function refuseBidirectional(json: ConfigReader): void {
  if (!json.has("use_bidirectional_attention") || !json.flag("use_bidirectional_attention")) return;
  throw json.refuse("use_bidirectional_attention is true, and meshnet runs causal models only", "use a causal model");
}
