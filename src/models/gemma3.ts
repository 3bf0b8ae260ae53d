import { readActivation } from "./activation.ts";
import { ConfigReader } from "./config.ts";
import { decoder, type DecoderConfig, readShape, readSliding, sandwichLayer, wireDecoder } from "./decoder.ts";
import { defineFamily } from "./family.ts";
import { gemmaEmbedScale, refuseBidirectional } from "./gemma.ts";
import { readRope, withRopes } from "./rope.ts";

/** Gemma 3 without pictures (transformers, `models/gemma3`): Gemma 2 with normed heads instead of soft caps, and two ropes. */
export const gemma3Text = gemma3Of("gemma3_text", readText);

/**
 * The language model of a Gemma 3 that also sees: its configuration and its weights lie one level deeper. Its logits
 * are never capped, whatever the text's configuration says: so it is in transformers.
 */
export const gemma3 = gemma3Of("gemma3", (json) => ({
  ...readText(json.nested("text_config") ?? json.empty("text_config")),
  logitSoftcap: undefined,
  tieWordEmbeddings: json.flag("tie_word_embeddings", true),
}));

function gemma3Of(modelType: string, parse: (json: ConfigReader) => DecoderConfig) {
  return defineFamily({
    modelType,
    prefixes: ["model.", "", "language_model.model.", "model.language_model.", "language_model."],
    ignored: /(^|\.)(rotary_emb\.inv_freq|position_ids)$|^(model\.)?(vision_tower|multi_modal_projector)\./,
    parseConfig: (json: ConfigReader): DecoderConfig => ({ ...parse(json), modelType }),
    modules: (config, options) => decoder(config, options, (layer) => sandwichLayer(config, layer, options)),
    wire: (modules) => wireDecoder(modules),
  });
}

function readText(json: ConfigReader): DecoderConfig {
  refuseBidirectional(json);
  const shape = readShape(json, {
    vocabSize: 262_208,
    hiddenSize: 2304,
    innerSize: 9216,
    layers: 26,
    heads: 8,
    kvHeads: 4,
    headDim: 256,
    maxPositions: 131_072,
    tied: true,
  });
  const attentionBias = json.flag("attention_bias", false);
  const window = json.countUnlessNull("sliding_window", 4096);
  const pattern = json.count("sliding_window_pattern", 6);
  return {
    modelType: "gemma3_text",
    ...shape,
    activation: readActivation(json, "hidden_activation", "gelu_pytorch_tanh"),
    norm: { eps: json.fraction("rms_norm_eps", 1e-6), offset: 1 },
    attentionScale: json.positive("query_pre_attn_scalar", 256) ** -0.5,
    // `attn_logit_softcapping` is not for this family, even where a file has it: transformers never passes it on.
    logitSoftcap: json.positiveUnlessNull("final_logit_softcapping", undefined),
    embedScale: gemmaEmbedScale(shape.hiddenSize),
    bias: { qkv: attentionBias, output: attentionBias, mlp: false },
    qkNorm: true,
    fused: false,
    ...withRopes(readRopes(json, shape)),
    layerTypes: readSliding(json, shape.layers, window, (layer) => (layer + 1) % pattern !== 0).map((slides) =>
      slides ? { rope: "sliding", window } : { rope: "full" },
    ),
  };
}

/** Sliding layers have a θ of their own and are never scaled; `rope_scaling` is for the others. */
function readRopes(json: ConfigReader, shape: { headDim: number; maxPositions: number }) {
  const nested = json.nested("rope_parameters") ?? json.empty("rope_parameters");
  const of = (type: string) => nested.nested(type) ?? nested.empty(type);
  return {
    full: readRope(of("full_attention").overlaid(json.nested("rope_scaling")), {
      ...shape,
      theta: json.positive("rope_theta", 1e6),
    }),
    sliding: readRope(of("sliding_attention"), { ...shape, theta: json.positive("rope_local_base_freq", 1e4) }),
  };
}
