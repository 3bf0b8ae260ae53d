import { UserError } from "../base/errors.ts";
import { isHead, isTail } from "../base/span.ts";
import {
  type ActivationName,
  attention,
  gatedActivation,
  headNorm,
  linear,
  type ModuleSpec,
  residual,
  rmsNorm,
  type RmsNormForm,
  rope,
  ropeTable,
  sideBySide,
  softcap,
  tokenEmbedding,
} from "../nn/index.ts";
import { type ConfigReader, type ModelConfig, MOST_LAYERS } from "./config.ts";
import { logitRowsFor, type Model, type StageOptions } from "./family.ts";
import { pairsOf, type Rope, ropeAngles } from "./rope.ts";
import { type Block, block, type Built } from "./tree.ts";

// What the families after Llama have in common: RMS norms, rotary positions, grouped key heads, gated MLPs.

export interface DecoderConfig extends ModelConfig {
  readonly innerSize: number;
  readonly activation: ActivationName;
  readonly norm: RmsNormForm;
  /** Factor of q · k. */
  readonly attentionScale: number;
  readonly attentionSoftcap?: number;
  readonly logitSoftcap?: number;
  /** Factor of the embedding. */
  readonly embedScale: number;
  readonly bias: { readonly qkv: boolean; readonly output: boolean; readonly mlp: boolean };
  /** Queries and keys are normed head by head before they are turned. */
  readonly qkNorm: boolean;
  /** Projections whose files hold q, k and v in one tensor, and gate and up in another. */
  readonly fused: boolean;
  /** By the names that `layerTypes` uses. */
  readonly ropes: Readonly<Record<string, Rope>>;
  /** [layers] */
  readonly layerTypes: readonly LayerType[];
}

/** What differs from layer to layer. */
export interface LayerType {
  readonly rope: string;
  /** Keys that a query sees, itself included. Undefined: all. */
  readonly window?: number;
}

/** Prefixes of names in checkpoints, and names that no one needs. */
export const DECODER_NAMES = {
  prefixes: ["model.", ""],
  ignored: /(^|\.)(rotary_emb\.inv_freq|position_ids)$/,
} as const;

/** What all these families' configurations say under the same keys. `kvHeads`: where the file does not say it; null means as many as heads. */
export function readShape(
  json: ConfigReader,
  defaults: {
    vocabSize: number;
    hiddenSize: number;
    innerSize: number;
    layers: number;
    heads: number;
    kvHeads?: number;
    headDim?: number;
    maxPositions: number;
    tied?: boolean;
  },
) {
  const hiddenSize = json.count("hidden_size", defaults.hiddenSize);
  const heads = json.count("num_attention_heads", defaults.heads);
  const kvHeads = json.countUnlessNull("num_key_value_heads", defaults.kvHeads) ?? heads;
  const headDim = json.optionalCount("head_dim") ?? defaults.headDim ?? Math.floor(hiddenSize / heads);
  if (heads % kvHeads !== 0) {
    throw new UserError(
      "bad_model",
      `config.json: num_attention_heads ${heads} is not a multiple of num_key_value_heads ${kvHeads}`,
      "use the config.json that belongs to the model",
    );
  }
  if (headDim < 1 || headDim > MOST_HEAD_DIM) {
    throw new UserError(
      headDim < 1 ? "bad_model" : "unsupported_model",
      `config.json: heads of ${headDim} dimensions, and meshnet takes 1 to ${MOST_HEAD_DIM}`,
      "use the config.json that belongs to the model",
    );
  }
  return {
    vocabSize: json.count("vocab_size", defaults.vocabSize),
    hiddenSize,
    innerSize: json.count("intermediate_size", defaults.innerSize),
    layers: json.count("num_hidden_layers", defaults.layers, MOST_LAYERS),
    heads,
    kvHeads,
    headDim,
    maxPositions: json.count("max_position_embeddings", defaults.maxPositions),
    tieWordEmbeddings: json.flag("tie_word_embeddings", defaults.tied ?? false),
  };
}

/** The largest head whose keys fit into workgroup memory. */
export const MOST_HEAD_DIM = 256;

/** Layers of one kind. */
export const allLayers = (layers: number, type: LayerType): LayerType[] => Array.from({ length: layers }, () => type);

/**
 * `layer_types`, or what the family does where the file does not say: whether each layer sees only a window.
 * @throws UserError `unsupported_model` for a type of layer that is not known, by name, and for one that slides where the
 * file has no `window`.
 */
export function readSliding(
  json: ConfigReader,
  layers: number,
  window: number | undefined,
  slidesByDefault: (layer: number) => boolean,
): boolean[] {
  const types = json.optionalTexts("layer_types", layers);
  return Array.from({ length: layers }, (_, layer) => {
    const type = types?.[layer];
    if (type === undefined) return slidesByDefault(layer);
    if (type === "sliding_attention" && window !== undefined) return true;
    if (type === "sliding_attention") {
      throw json.refuse(
        `layer ${layer} is of the type "sliding_attention", and there is no window: sliding_window is null, or use_sliding_window is not true`,
        "use the config.json that belongs to the weights",
      );
    }
    if (type === "full_attention") return false;
    throw json.refuse(
      `layer ${layer} is of the type "${type}", which meshnet does not know`,
      "known are full_attention, sliding_attention",
    );
  });
}

/** Everything of a span but its layers, and those by `layerOf`. */
export function decoder(config: DecoderConfig, options: StageOptions, layerOf: (layer: number) => ModuleSpec<Block>) {
  const { hiddenSize, vocabSize } = config;
  const { span, maxContext } = options;
  const layers = Array.from({ length: span.end - span.start }, (_, i) => span.start + i);
  const ropes = new Set(layers.map((layer) => config.layerTypes[layer]!.rope));

  // A tied model may lack one of the two; where a file holds both, each is taken as it stands.
  const tied = config.tieWordEmbeddings;
  return {
    embedding: isHead(span)
      ? tokenEmbedding({
          names: tied ? ["embed_tokens.weight", "lm_head.weight"] : ["embed_tokens.weight"],
          vocabSize,
          columns: hiddenSize,
          scale: config.embedScale,
          output: "stream",
        })
      : undefined,
    ropes: [...ropes].map((name) =>
      ropeTable({
        ...ropeTableOf(config, name),
        positions: maxContext,
        angles: ropeAngles(config.ropes[name]!, maxContext),
      }),
    ),
    layers: layers.map(layerOf),
    norm: isTail(span) ? norm(config, "norm") : undefined,
    head: isTail(span)
      ? linear({
          weight: tied ? ["lm_head.weight", "embed_tokens.weight"] : ["lm_head.weight"],
          in: hiddenSize,
          out: vocabSize,
          output: "logits",
          outputRows: logitRowsFor(vocabSize),
          round: config.logitSoftcap === undefined, // else the cap rounds
          keepsBf16: true,
        })
      : undefined,
    cap:
      isTail(span) && config.logitSoftcap !== undefined
        ? softcap({ cap: config.logitSoftcap, columns: vocabSize })
        : undefined,
  };
}

export const wireDecoder = ({ embedding, layers, norm, head, cap }: Built<ReturnType<typeof decoder>>): Model => ({
  embed: embedding && ((pass) => embedding.forward(pass)),
  layers: layers.map((layer) => (pass, stream) => layer.forward(pass, stream)),
  norm: norm && ((pass, stream) => norm.forward(pass, stream)),
  logits:
    head &&
    ((pass, hidden) => {
      const logits = head.forward(pass, hidden);
      return cap ? cap.forward(pass, logits) : logits;
    }),
});

/** x += attention(norm(x)); x += mlp(norm(x)): Llama's layer. */
export function preNormLayer(
  config: DecoderConfig,
  layer: number,
  options: StageOptions,
  mlp: ModuleSpec<Block> = gatedMlp(config, `layers.${layer}.mlp`, options),
  attend: ModuleSpec<Block> = selfAttention(config, layer, options),
): ModuleSpec<Block> {
  const columns = config.hiddenSize;
  return block(
    {
      norm1: norm(config, `layers.${layer}.input_layernorm`),
      attend,
      add1: residual({ columns, round: false }),
      norm2: norm(config, `layers.${layer}.post_attention_layernorm`),
      mlp,
      add2: residual({ columns, round: true }),
    },
    ({ norm1, attend, add1, norm2, mlp, add2 }) =>
      (pass, stream) => {
        add1.forward(pass, stream, attend.forward(pass, norm1.forward(pass, stream)));
        return add2.forward(pass, stream, mlp.forward(pass, norm2.forward(pass, stream)));
      },
  );
}

/** x += norm(attention(norm(x))); x += norm(mlp(norm(x))): Gemma 2's and 3's layer. */
export function sandwichLayer(config: DecoderConfig, layer: number, options: StageOptions): ModuleSpec<Block> {
  const columns = config.hiddenSize;
  const name = (norm: string) => `layers.${layer}.${norm}_layernorm`;
  return block(
    {
      norm1: norm(config, name("input")),
      attend: selfAttention(config, layer, options),
      norm2: norm(config, name("post_attention")),
      add1: residual({ columns, round: false }),
      norm3: norm(config, name("pre_feedforward")),
      mlp: gatedMlp(config, `layers.${layer}.mlp`, options),
      norm4: norm(config, name("post_feedforward")),
      add2: residual({ columns, round: true }),
    },
    ({ norm1, attend, norm2, add1, norm3, mlp, norm4, add2 }) =>
      (pass, stream) => {
        const attended = attend.forward(pass, norm1.forward(pass, stream));
        add1.forward(pass, stream, norm2.forward(pass, attended));
        const inner = mlp.forward(pass, norm3.forward(pass, stream));
        return add2.forward(pass, stream, norm4.forward(pass, inner));
      },
  );
}

/** Normed rows to what is added to the stream: queries, keys and values, turned by their positions, through the cache. */
export function selfAttention(
  config: DecoderConfig,
  layer: number,
  { maxContext, int8Activations }: StageOptions,
): ModuleSpec<Block> {
  const { heads, kvHeads, headDim, hiddenSize, bias, attentionSoftcap } = config;
  const { rope: ropeName, window } = config.layerTypes[layer]!;
  const name = `layers.${layer}.self_attn`;
  const layout = sideBySide(heads, kvHeads, headDim);
  const { queries, keys, values, columns } = layout;
  const project = (part: string, out: number, outputAt = 0) =>
    linear({
      weight: [`${name}.${part}_proj.weight`],
      bias: bias.qkv ? `${name}.${part}_proj.bias` : undefined,
      in: hiddenSize,
      out,
      output: "qkv",
      outputAt,
      outputColumns: columns,
      int8Activations,
    });
  const qkNorm = (part: string, place: typeof queries) =>
    headNorm({ name: `${name}.${part}_norm`, ...config.norm, headDim, columns, place });

  return block(
    {
      project: config.fused
        ? [project("qkv", columns)]
        : [
            project("q", heads * headDim),
            project("k", kvHeads * headDim, keys.first),
            project("v", kvHeads * headDim, values.first),
          ],
      norms: config.qkNorm ? [qkNorm("q", queries), qkNorm("k", keys)] : [],
      // Queries and keys lie side by side and are turned alike.
      turn: rope({
        table: ropeTableOf(config, ropeName),
        columns,
        places: [{ ...queries, heads: heads + kvHeads }],
      }),
      attend: attention({
        layer,
        heads,
        kvHeads,
        headDim,
        layout,
        scale: config.attentionScale,
        window,
        softcap: attentionSoftcap,
        maxContext,
        output: "attended",
      }),
      output: linear({
        weight: [`${name}.o_proj.weight`],
        bias: bias.output ? `${name}.o_proj.bias` : undefined,
        in: heads * headDim,
        out: hiddenSize,
        output: "projected",
        int8Activations,
      }),
    },
    ({ project, norms, turn, attend, output }) =>
      (pass, x) => {
        const [qkv] = project.map((each) => each.forward(pass, x));
        for (const norm of norms) norm.forward(pass, qkv!);
        return output.forward(pass, attend.forward(pass, turn.forward(pass, qkv!)));
      },
  );
}

/** down(activation(gate(x)) · up(x)), with the modules below `name`. `prefix`: of its temporaries, where its size is another. */
export function gatedMlp(
  config: DecoderConfig,
  name: string,
  { int8Activations }: StageOptions,
  innerSize = config.innerSize,
  prefix = "",
): ModuleSpec<Block> {
  const { hiddenSize, activation, bias } = config;
  const part = (which: string, out: number, outputAt = 0) =>
    linear({
      weight: [`${name}.${which}_proj.weight`],
      bias: bias.mlp ? `${name}.${which}_proj.bias` : undefined,
      in: hiddenSize,
      out,
      output: `${prefix}gate_up`,
      outputAt,
      outputColumns: 2 * innerSize,
      int8Activations,
    });
  return block(
    {
      expand: config.fused
        ? [part("gate_up", 2 * innerSize)]
        : [part("gate", innerSize), part("up", innerSize, innerSize)],
      activate: gatedActivation({ name: activation, columns: innerSize, output: `${prefix}inner` }),
      contract: linear({
        weight: [`${name}.down_proj.weight`],
        bias: bias.mlp ? `${name}.down_proj.bias` : undefined,
        in: innerSize,
        out: hiddenSize,
        output: "projected",
        int8Activations,
      }),
    },
    ({ expand, activate, contract }) =>
      (pass, x) => {
        const [gateUp] = expand.map((each) => each.forward(pass, x));
        return contract.forward(pass, activate.forward(pass, gateUp!));
      },
  );
}

const norm = ({ norm: form, hiddenSize }: DecoderConfig, name: string) =>
  rmsNorm({ name, ...form, columns: hiddenSize, output: "normed" });

export const ropeTableOf = ({ ropes }: DecoderConfig, name: string) => ({
  label: `rope_${name}`,
  pairs: pairsOf(ropes[name]!),
});
