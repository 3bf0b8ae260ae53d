import type { Commands } from "../gpu/commands.ts";
import type { Tensor } from "../gpu/tensor.ts";

/** The first `rows` rows of a tensor that has room for more. */
export interface Activations {
  readonly tensor: Tensor;
  readonly rows: number;
}

/** What one pass through a stage's modules has at hand. */
export interface Pass {
  readonly commands: Commands;
  readonly temporaries: Temporaries;
  /** Tokens of all rows. */
  readonly tokens: number;
  /** [tokens, 2]: id and position. Ids are set where the pass begins with ids. */
  readonly tokenTable: Tensor;
  /** [1, tokens]: the cache slot that each token's keys and values go to. */
  readonly slotTable: Tensor;
  readonly attention: AttentionRuns;
}

/** The queries of a pass, cut into runs that one workgroup takes through the keys together. */
export interface AttentionRuns {
  /** [runs, 4]: first token, count, first position, first entry in `pages`. */
  readonly queries: Tensor;
  /** [1, entries]: the cache pages of each sequence, from its position 0 on. */
  readonly pages: Tensor;
  readonly runs: number;
  /** Runs of one query, which come first: each one's keys are spread over workgroups. */
  readonly singles: number;
  /** Tokens of the longest sequence among these, this pass's included. */
  readonly longestSingle: number;
}

export interface Temporaries {
  /** @throws Error for a label that no module of the plan declared: a bug. */
  get(label: string): Tensor;
}
