import type { UserError } from "../base/errors.ts";
import type { Span } from "../base/span.ts";
import type { Sampling } from "../protocol/sampling.ts";

/** One run of real tokens of one sequence. Padding does not exist in here. */
export interface Row {
  /** Real tokens of the sequence in this call, at least 1. */
  readonly tokens: number;
  /** Real tokens of the sequence before this call: the position of the first one here. */
  readonly positionStart: number;
}

/** What a stage is given: token ids (a head), or hidden states (any stage: they enter its first layer). */
export type StageInput =
  | {
      readonly kind: "ids";
      readonly rows: readonly Row[];
      /** [T] token ids, row after row */ readonly ids: Int32Array;
    }
  | {
      readonly kind: "hidden";
      readonly rows: readonly Row[];
      /** [T, hiddenSize] bfloat16 bit patterns, row after row */
      readonly hidden: Uint16Array;
    };

/** What the tail shall give. Any other stage gives its hidden states, whatever is wanted. */
export type Want = "token" | "logits" | "all_logits" | "hidden" | "none";

export type StageOutput =
  /** `values`: [T, hiddenSize] bfloat16: after the last layer of the span, and after the final norm at the tail. */
  | { readonly kind: "hidden"; readonly values: Uint16Array }
  /** `ids`: one per row: the argmax of the logits of its last token, the lowest id among equals. */
  | { readonly kind: "token"; readonly ids: number[] }
  /** `values`: [rows, vocabSize] bfloat16, of the last token of each row. */
  | { readonly kind: "logits"; readonly values: Uint16Array }
  /** `values`: [T, vocabSize] bfloat16. */
  | { readonly kind: "all_logits"; readonly values: Uint16Array }
  | { readonly kind: "none" };

/** What the rest of the program needs to know of a loaded stage. */
export interface StageInfo {
  readonly span: Span;
  readonly hiddenSize: number;
  readonly vocabSize: number;
  /** The longest sequence, in tokens: the model's own limit or `--max-context`, whichever is smaller. */
  readonly maxContext: number;
  /** Ids that end a sequence (generation_config.json before config.json). */
  readonly eosTokenIds: readonly number[];
}

/** One call for one sequence: the tokens that follow what its session holds. */
export interface Step {
  readonly input:
    | { readonly kind: "ids"; /** [n] */ readonly ids: Int32Array }
    | { readonly kind: "hidden"; /** [n, hiddenSize] bfloat16 bit patterns */ readonly hidden: Uint16Array };
  /** Real tokens before these. Less than the session's length: the cache is cut back to it first. */
  readonly positionStart: number;
  readonly want: Want;
  /** How the tail draws a token; absent: the likeliest. */
  readonly sampling?: Sampling;
  /** [n] The ids of tokens that come as hidden states: for sampling with the history, and to share common beginnings. */
  readonly tokenIds?: Int32Array;
  /** Rows with the same value came in one call. Exact LLM.int8() runs them together, and nothing else with them. */
  readonly call?: unknown;
  /** Aborted: the step leaves the queue at once, or after the pass that it is in. */
  readonly signal?: AbortSignal;
}

/** What a step gives: of its n tokens, or of the last one. */
export type StepOutput =
  /** [n, hiddenSize] bfloat16 */
  | { readonly kind: "hidden"; readonly values: Uint16Array }
  | { readonly kind: "token"; readonly id: number; readonly logprobs?: TokenLogprobs }
  /** [vocabSize] bfloat16 */
  | { readonly kind: "logits"; readonly values: Uint16Array }
  /** [n, vocabSize] bfloat16 */
  | { readonly kind: "all_logits"; readonly values: Uint16Array }
  | { readonly kind: "none" };

/** Natural logarithms of probabilities, of the raw logits. */
export interface TokenLogprobs {
  /** Of the token given. */
  readonly logprob: number;
  /** The likeliest tokens, as many as were asked for, the best first. */
  readonly top: readonly { readonly id: number; readonly logprob: number }[];
}

export interface OpenSession {
  /** Tokens to reserve room for. */
  readonly maxLength: number;
  /** Begin with cached tokens that an earlier session left here: the digest of their ids (`prefixDigests`). */
  readonly prefix?: string;
  /**
   * `lasting`: kept between calls; without room it is refused at once. `passing`: for one call; it waits for others of
   * its kind to end, and is refused where that would not help.
   */
  readonly stay: "lasting" | "passing";
  readonly signal?: AbortSignal;
}

/** One sequence's keys and values in this stage's layers. Steps of one session run one after another. */
export interface Session {
  /** Tokens held. */
  readonly length: number;
  readonly maxLength: number;
  /**
   * Runs the tokens of a step. After an error the session is as it was before, or closed where that cannot be.
   * @throws UserError `session_lost` (with `cache_len`) when `positionStart` is beyond its length or it is closed,
   * `context_exceeded` beyond `maxLength`, `device_lost`, `non_finite`, `token_id`; the signal's reason.
   */
  run(step: Step): Promise<StepOutput>;
  /** Forgets the tokens from `length` on. */
  cut(length: number): void;
  readonly isClosed: boolean;
  /** Gives its room back, after the pass that it is in. A second call does nothing. */
  close(): void;
}

/** Room for sequences, in pages of `pageTokens` tokens. */
export interface CacheUse {
  readonly pageTokens: number;
  readonly pages: number;
  /** Promised to open sessions. */
  readonly reservedPages: number;
  readonly sessions: number;
  /** Sessions that began with tokens found here, and how many tokens these were. */
  readonly prefixHits: number;
  readonly prefixTokens: number;
}

/** Passes through the layers since the stage was opened. */
export interface StageWork {
  readonly passes: number;
  /** Milliseconds in them: from what goes onto the device to what comes back. */
  readonly ms: number;
}

/** A span of layers on a device. Steps that wait at the same time run in one pass. */
export interface Stage {
  readonly info: StageInfo;
  readonly cacheUse: CacheUse;
  /** Steps that run or wait. */
  readonly waiting: number;
  /** What it has done so far. */
  readonly work?: StageWork;
  /** Why it takes nothing now: its device is lost and is being opened anew. */
  readonly outage?: UserError;
  /**
   * @throws UserError `no_room` where its tokens have no room now (429), `context_exceeded` where they never will,
   * `session_lost` where no earlier session left the prefix; the signal's reason.
   */
  open(session: OpenSession): Promise<Session>;
  /** The longest beginning of `ids` that sessions can start with here: its tokens (0: none) and digest. */
  longestPrefix(ids: Int32Array): { readonly tokens: number; readonly prefix?: string };
  /** Frees the device memory. */
  destroy(): void;
}
