import { UserError } from "../base/errors.ts";
import { isHead, isTail } from "../base/span.ts";
import {
  activation,
  type ActivationName,
  attention,
  headByHead,
  layerNorm,
  linear,
  type ModuleSpec,
  residual,
  rope,
  ropeTable,
  tokenEmbedding,
} from "../nn/index.ts";
import { readActivation } from "./activation.ts";
import { type ConfigReader, type ModelConfig, MOST_LAYERS } from "./config.ts";
import { defineFamily, logitRowsFor, type StageOptions } from "./family.ts";
import { contextEdgeOf, pairsOf, readRope, type Rope, ropeAngles, ropeParameters } from "./rope.ts";
import { type Block, block } from "./tree.ts";

interface NeoxConfig extends ModelConfig {
  readonly innerSize: number;
  readonly activation: ActivationName;
  readonly eps: number;
  readonly attentionBias: boolean;
  readonly parallel: boolean;
  readonly rope: Rope;
}

/** GPT-NeoX and Pythia (transformers, `models/gpt_neox`): attention and MLP side by side, qkv head by head, partly turned. */
export const gptNeox = defineFamily({
  modelType: "gpt_neox",
  prefixes: ["gpt_neox.", ""],
  ignored: /(^|\.)(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)$/,

  parseConfig(json: ConfigReader): NeoxConfig {
    const hiddenSize = json.count("hidden_size", 6144);
    const heads = json.count("num_attention_heads", 64);
    if (hiddenSize % heads !== 0) {
      throw new UserError(
        "bad_model",
        `config.json: hidden_size ${hiddenSize} is not a multiple of num_attention_heads ${heads}`,
        "use the config.json that belongs to the model",
      );
    }
    const headDim = hiddenSize / heads;
    const maxPositions = json.count("max_position_embeddings", 2048);
    const rope = readRope(ropeParameters(json), {
      headDim,
      maxPositions,
      theta: json.positive("rotary_emb_base", 1e4),
      partial: json.positive("rotary_pct", 0.25),
      trained: json.optionalCount("original_max_position_embeddings"),
      partialByDefault: true,
    });
    return {
      modelType: "gpt_neox",
      vocabSize: json.count("vocab_size", 50432),
      hiddenSize,
      innerSize: json.count("intermediate_size", 24576),
      layers: json.count("num_hidden_layers", 44, MOST_LAYERS),
      heads,
      kvHeads: heads,
      headDim,
      maxPositions: rope.reach,
      tieWordEmbeddings: json.flag("tie_word_embeddings", false),
      activation: readActivation(json, "hidden_act", "gelu"),
      eps: json.fraction("layer_norm_eps", 1e-5),
      attentionBias: json.flag("attention_bias", true),
      parallel: json.flag("use_parallel_residual", true),
      rope,
      contextEdge: contextEdgeOf([rope]),
    };
  },

  modules(config, options) {
    const { hiddenSize, vocabSize, eps, tieWordEmbeddings: tied } = config;
    const { span, maxContext } = options;
    return {
      embedding: isHead(span)
        ? tokenEmbedding({
            names: tied ? ["embed_in.weight", "embed_out.weight"] : ["embed_in.weight"],
            vocabSize,
            columns: hiddenSize,
            scale: 1,
            output: "stream",
          })
        : undefined,
      rope: ropeTable({ ...tableOf(config), positions: maxContext, angles: ropeAngles(config.rope, maxContext) }),
      layers: Array.from({ length: span.end - span.start }, (_, i) => layerOf(config, span.start + i, options)),
      norm: isTail(span)
        ? layerNorm({ name: "final_layer_norm", columns: hiddenSize, eps, output: "normed" })
        : undefined,
      head: isTail(span)
        ? linear({
            weight: tied ? ["embed_out.weight", "embed_in.weight"] : ["embed_out.weight"],
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
    layers: layers.map((layer) => (pass, stream) => layer.forward(pass, stream)),
    norm: norm && ((pass, stream) => norm.forward(pass, stream)),
    logits: head && ((pass, hidden) => head.forward(pass, hidden)),
  }),
});

/** x = (mlp(norm(x)) + attention(norm(x))) + x side by side, or one after another as in GPT-2. */
function layerOf(config: NeoxConfig, layer: number, options: StageOptions): ModuleSpec<Block> {
  const { hiddenSize: columns, eps, parallel } = config;
  const norm = (which: string) =>
    layerNorm({ name: `layers.${layer}.${which}_layernorm`, columns, eps, output: "normed" });
  return block(
    {
      norm1: norm("input"),
      attend: selfAttention(config, layer, options),
      add1: residual({ columns, round: false }),
      norm2: norm("post_attention"),
      mlp: mlp(config, layer, options),
      add2: residual({ columns, round: true }),
    },
    ({ norm1, attend, add1, norm2, mlp, add2 }) =>
      (pass, stream) => {
        const attended = attend.forward(pass, norm1.forward(pass, stream));
        if (parallel) {
          const inner = mlp.forward(pass, norm2.forward(pass, stream));
          return add2.forward(pass, stream, add1.forward(pass, inner, attended));
        }
        add1.forward(pass, stream, attended);
        return add2.forward(pass, stream, mlp.forward(pass, norm2.forward(pass, stream)));
      },
  );
}

function selfAttention(config: NeoxConfig, layer: number, options: StageOptions): ModuleSpec<Block> {
  const { hiddenSize, heads, headDim, attentionBias } = config;
  const name = `layers.${layer}.attention`;
  const layout = headByHead(heads, headDim);
  const project = (which: string, sizes: { in: number; out: number; output: string }) =>
    linear({
      weight: [`${name}.${which}.weight`],
      bias: attentionBias ? `${name}.${which}.bias` : undefined,
      int8Activations: options.int8Activations,
      ...sizes,
    });
  return block(
    {
      project: project("query_key_value", { in: hiddenSize, out: layout.columns, output: "qkv" }),
      turn: rope({ table: tableOf(config), columns: layout.columns, places: [layout.queries, layout.keys] }),
      attend: attention({
        layer,
        heads,
        kvHeads: heads,
        headDim,
        layout,
        scale: headDim ** -0.5,
        maxContext: options.maxContext,
        output: "attended",
      }),
      output: project("dense", { in: hiddenSize, out: hiddenSize, output: "projected" }),
    },
    ({ project, turn, attend, output }) =>
      (pass, x) =>
        output.forward(pass, attend.forward(pass, turn.forward(pass, project.forward(pass, x)))),
  );
}

function mlp(config: NeoxConfig, layer: number, { int8Activations }: StageOptions): ModuleSpec<Block> {
  const { hiddenSize, innerSize } = config;
  const part = (which: string, sizes: { in: number; out: number; output: string }) => {
    const name = `layers.${layer}.mlp.${which}`;
    return linear({ weight: [`${name}.weight`], bias: `${name}.bias`, int8Activations, ...sizes });
  };
  return block(
    {
      expand: part("dense_h_to_4h", { in: hiddenSize, out: innerSize, output: "inner" }),
      activate: activation({ name: config.activation, columns: innerSize }),
      contract: part("dense_4h_to_h", { in: innerSize, out: hiddenSize, output: "contracted" }),
    },
    ({ expand, activate, contract }) =>
      (pass, x) =>
        contract.forward(pass, activate.forward(pass, expand.forward(pass, x))),
  );
}

const tableOf = ({ rope }: NeoxConfig) => ({ label: "rope_all", pairs: pairsOf(rope) });
