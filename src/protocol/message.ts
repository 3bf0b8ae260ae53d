import type { UserError } from "../base/errors.ts";
import type { Span } from "../base/span.ts";
import type { CallFields } from "./headers.ts";
import type { Rectangle } from "./rectangle.ts";
import type { RowFields, Sampling, Want } from "./rows.ts";

export type Spelling = "text" | "raw" | "container";

/** What a call brings: T real tokens, row after row. */
export type Payload =
  | {
      readonly kind: "ids";
      /** [T] */ readonly ids: Int32Array;
      /** The node tokenized them. */ readonly fromText: boolean;
    }
  | {
      readonly kind: "hidden";
      readonly hiddenSize: number;
      /** [T, hiddenSize] bfloat16 */ readonly values: Uint16Array;
    };

export interface ForwardRow {
  /** Its place among the rows of the call, those included that take no part. */
  readonly index: number;
  readonly tokens: number;
  readonly positionStart: number;
  readonly want: Want;
  readonly session?: string;
  /** Always there with a session. */
  readonly step?: number;
  readonly maxLen?: number;
  readonly prefix?: string;
  readonly sampling?: Sampling;
  /** Why this row cannot run, while the others can. */
  readonly problem?: UserError;
}

/** A call that this node can run: everything in it has been checked against the node. */
export interface ForwardRequest extends CallFields {
  readonly spelling: Spelling;
  readonly payload: Payload;
  /** The rows that take part, each with at least one token. */
  readonly rows: readonly ForwardRow[];
  /** How the rows lay in the call, to lay the reply out in the same way. Undefined: as rows, in a container. */
  readonly rectangle: Rectangle | undefined;
  /** What all rows want; `token` where some of them want nothing. */
  readonly want: Want;
  /** [T] The ids of tokens that come as hidden states, where the sender gave them. */
  readonly tokenIds?: Int32Array;
}

/** What a call is checked against. */
export interface NodeFacts {
  readonly span: Span;
  readonly hiddenSize: number;
  readonly vocabSize: number;
  readonly maxContext: number;
  readonly maxRows: number;
  /** The model digest. */
  readonly model: string;
  /** A head's tokenizer. */
  readonly encode?: (text: string, addSpecialTokens: boolean) => number[];
}

/** What each spelling is read into: all rows as they came, those that take no part included. */
export interface Draft {
  readonly spelling: Spelling;
  readonly call: CallFields;
  readonly payload: Payload;
  /** [T] beside hidden states */
  readonly tokenIds?: Int32Array;
  readonly lengths: readonly number[];
  readonly fields: readonly RowFields[];
  readonly rectangle: Rectangle | undefined;
}

export interface Message {
  readonly headers: Headers;
  readonly body: Uint8Array;
}
