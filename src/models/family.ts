import type { Span } from "../base/span.ts";
import type { Activations, BuildContext, Encoding, ModuleSpec, Pass } from "../nn/index.ts";
import type { ConfigReader, ModelConfig } from "./config.ts";
import { type Built, buildTree, flatten, type Tree } from "./tree.ts";

/** The part of a model that one node holds, ready to run. */
export interface Model {
  /** Token ids to the stream that enters layer 0. Head only. */
  readonly embed?: (pass: Pass) => Activations;
  /** The layers of the span, in order. */
  readonly layers: readonly ((pass: Pass, stream: Activations) => Activations)[];
  /** The final norm. Tail only. */
  readonly norm?: (pass: Pass, stream: Activations) => Activations;
  /** Normed hidden states to logits, rounded to bfloat16. Tail only. */
  readonly logits?: (pass: Pass, hidden: Activations) => Activations;
}

/** What a family is: its configuration, its modules by checkpoint name, and its wiring. */
export interface Family {
  readonly modelType: string;
  /** What may stand in front of every name in a checkpoint, the most common first. */
  readonly prefixes: readonly string[];
  /** Names that checkpoints carry and no one needs. */
  readonly ignored: RegExp;
  /** Checkpoints may carry layers behind the last, which guess at further tokens: multi-token prediction. */
  readonly mayHaveMoreLayers?: boolean;
  parseConfig(json: ConfigReader): ModelConfig;
  /** Every module of the span: the load plan adds up what they need. */
  specs(config: ModelConfig, options: StageOptions): ModuleSpec<unknown>[];
  /** The same modules, built and wired. */
  build(config: ModelConfig, options: StageOptions, context: BuildContext): Promise<Model>;
}

export interface StageOptions {
  readonly span: Span;
  /** The longest sequence, in tokens. */
  readonly maxContext: number;
  /** Sequences of that length for which the cache has room. */
  readonly maxSessions: number;
  /** The most tokens of one pass; longer calls take several. Default: 512, or all that the cache holds. */
  readonly passTokens?: number;
  /** Of the weights that bitsandbytes would quantize; all others are bfloat16. */
  readonly encoding: Encoding;
  /** With `int8` weights: activations in INT8 too, as LLM.int8() has them. Results then depend on what shares a call. */
  readonly int8Activations?: boolean;
}

/** Logits are made for as many rows at a time as fit in here, and for at most so many. */
const LOGIT_BYTES = 16 * 2 ** 20;
const MAX_LOGIT_ROWS = 64;

/** Rows of logits that a head makes at a time: they are the widest activations there are. */
export const logitRowsFor = (vocabSize: number): number =>
  Math.max(1, Math.min(MAX_LOGIT_ROWS, Math.floor(LOGIT_BYTES / (vocabSize * 4))));

export function defineFamily<C extends ModelConfig, T extends Tree>(family: {
  modelType: string;
  prefixes: readonly string[];
  ignored: RegExp;
  mayHaveMoreLayers?: boolean;
  parseConfig: (json: ConfigReader) => C;
  modules: (config: C, options: StageOptions) => T;
  wire: (modules: Built<T>) => Model;
}): Family {
  const { modelType, prefixes, ignored, mayHaveMoreLayers, parseConfig } = family;
  return {
    modelType,
    prefixes,
    ignored,
    mayHaveMoreLayers,
    parseConfig,
    specs: (config, options) => flatten(family.modules(config as C, options)),
    build: async (config, options, context) =>
      family.wire((await buildTree(family.modules(config as C, options), context)) as Built<T>),
  };
}
