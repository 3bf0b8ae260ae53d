import { UserError } from "../base/errors.ts";
import { isHead, isTail } from "../base/span.ts";
import {
  activation,
  type ActivationName,
  attention,
  layerNorm,
  linear,
  positionEmbedding,
  residual,
  sideBySide,
} from "../nn/index.ts";
import { readActivation } from "./activation.ts";
import { type ConfigReader, type ModelConfig, MOST_LAYERS } from "./config.ts";
import { defineFamily, logitRowsFor } from "./family.ts";

interface Gpt2Config extends ModelConfig {
  readonly innerSize: number;
  readonly activation: ActivationName;
  readonly eps: number;
  readonly scaleByHeadDim: boolean;
  readonly scaleByLayer: boolean;
}

/** GPT-2 (transformers, `models/gpt2`): learned positions, pre-norm blocks, fused qkv, weights kept as [in, out]. */
export const gpt2 = defineFamily({
  modelType: "gpt2",
  prefixes: ["", "transformer."],
  // The causal mask, saved with each layer. A looser pattern would also match attn.c_attn.bias, a real parameter.
  ignored: /(^|\.)h\.\d+\.attn\.(bias|masked_bias)$/,

  parseConfig(json: ConfigReader): Gpt2Config {
    const hiddenSize = json.count("n_embd", 768);
    const heads = json.count("n_head", 12);
    if (hiddenSize % heads !== 0) {
      throw new UserError(
        "bad_model",
        `config.json: n_embd ${hiddenSize} is not a multiple of n_head ${heads}`,
        "use the config.json that belongs to the model",
      );
    }
    return {
      modelType: "gpt2",
      vocabSize: json.count("vocab_size", 50257),
      hiddenSize,
      layers: json.count("n_layer", 12, MOST_LAYERS),
      heads,
      kvHeads: heads,
      headDim: hiddenSize / heads,
      maxPositions: json.count("n_positions", 1024),
      tieWordEmbeddings: json.flag("tie_word_embeddings", true),
      innerSize: json.optionalCount("n_inner") ?? 4 * hiddenSize,
      activation: readActivation(json, "activation_function", "gelu_new"),
      eps: json.fraction("layer_norm_epsilon", 1e-5),
      scaleByHeadDim: json.flag("scale_attn_weights", true),
      scaleByLayer: json.flag("scale_attn_by_inverse_layer_idx", false),
    };
  },

  modules(config, { span, maxContext, int8Activations }) {
    const { hiddenSize, innerSize, vocabSize, heads, headDim, eps } = config;
    const conv1d = (name: string, sizes: { in: number; out: number; output: string }) =>
      linear({
        weight: [`${name}.weight`],
        bias: `${name}.bias`,
        storedTransposed: true,
        int8Activations,
        ...sizes,
      });
    const norm = (name: string) => layerNorm({ name, columns: hiddenSize, eps, output: "normed" });

    const layer = (index: number) => {
      const h = `h.${index}`;
      const scale = (config.scaleByHeadDim ? headDim ** -0.5 : 1) / (config.scaleByLayer ? index + 1 : 1);
      return {
        ln1: norm(`${h}.ln_1`),
        qkv: conv1d(`${h}.attn.c_attn`, { in: hiddenSize, out: 3 * hiddenSize, output: "qkv" }),
        attention: attention({
          layer: index,
          heads,
          kvHeads: heads,
          headDim,
          layout: sideBySide(heads, heads, headDim),
          scale,
          maxContext,
          output: "attended",
        }),
        project: conv1d(`${h}.attn.c_proj`, { in: hiddenSize, out: hiddenSize, output: "projected" }),
        addAttention: residual({ columns: hiddenSize, round: false }),
        ln2: norm(`${h}.ln_2`),
        expand: conv1d(`${h}.mlp.c_fc`, { in: hiddenSize, out: innerSize, output: "inner" }),
        activate: activation({ name: config.activation, columns: innerSize }),
        contract: conv1d(`${h}.mlp.c_proj`, { in: innerSize, out: hiddenSize, output: "projected" }),
        addMlp: residual({ columns: hiddenSize, round: true }),
      };
    };

    // A tied model may lack one of the two; where a file holds both, each is taken as it stands.
    const tied = config.tieWordEmbeddings;
    return {
      embedding: isHead(span)
        ? positionEmbedding({
            tokens: tied ? ["wte.weight", "lm_head.weight"] : ["wte.weight"],
            vocabSize,
            positions: "wpe.weight",
            positionCount: config.maxPositions,
            columns: hiddenSize,
            output: "stream",
          })
        : undefined,
      layers: Array.from({ length: span.end - span.start }, (_, i) => layer(span.start + i)),
      norm: isTail(span) ? norm("ln_f") : undefined,
      head: isTail(span)
        ? linear({
            weight: tied ? ["lm_head.weight", "wte.weight"] : ["lm_head.weight"],
            in: hiddenSize,
            out: vocabSize,
            output: "logits",
            outputRows: logitRowsFor(vocabSize),
            round: true,
            keepsBf16: true,
          })
        : undefined,
    };
  },

  wire: ({ embedding, layers, norm, head }) => ({
    embed: embedding && ((pass) => embedding.forward(pass)),
    layers: layers.map((layer) => (pass, stream) => {
      const qkv = layer.qkv.forward(pass, layer.ln1.forward(pass, stream));
      const attended = layer.project.forward(pass, layer.attention.forward(pass, qkv));
      layer.addAttention.forward(pass, stream, attended);
      const inner = layer.activate.forward(pass, layer.expand.forward(pass, layer.ln2.forward(pass, stream)));
      return layer.addMlp.forward(pass, stream, layer.contract.forward(pass, inner));
    }),
    norm: norm && ((pass, stream) => norm.forward(pass, stream)),
    logits: head && ((pass, hidden) => head.forward(pass, hidden)),
  }),
});
