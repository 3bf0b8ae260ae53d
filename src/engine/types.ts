import type { Span } from "../base/span.ts";

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

/** A span of layers on a device. Calls run one after another in the order they came. */
export interface Stage {
  readonly info: StageInfo;
  /**
   * Runs the layers. When `signal` is aborted the call ends with its reason: before it runs, or between two of the passes
   * that a large call is made in, for a pass on the device cannot be stopped.
   * @throws UserError `device_lost` when the device is gone, `token_id`, `context_exceeded`, `empty_prompt`, `hidden_size`
   * for input that its caller should have checked at the border.
   */
  forward(input: StageInput, want: Want, signal?: AbortSignal): Promise<StageOutput>;
  /** Frees the device memory. */
  destroy(): void;
}
