import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { cut } from "../base/quote.ts";
import { formatSpan, isHead } from "../base/span.ts";
import type { CallFields } from "./headers.ts";
import type { Draft, NodeFacts, Payload } from "./message.ts";
import { firstSlot } from "./rectangle.ts";

/** The guard of every call: it enters at this node's first layer, and means this node's model. */
export function checkCall(call: CallFields, node: NodeFacts): void {
  const { fromLayer, model } = call;
  if (fromLayer !== undefined && fromLayer !== node.span.start) {
    throw new UserError(
      "from_layer",
      `the call enters layer ${fromLayer}, and this node holds layers ${formatSpan(node.span)}: it takes layer ${node.span.start}`,
      "send it to the node that starts at that layer",
    );
  }
  if (model !== undefined && model !== node.model) {
    throw new UserError(
      "model_mismatch",
      `the call is for the model ${cut(model)}, and this node holds ${node.model}`,
      "load the same model and revision on every node of the chain",
    );
  }
}

/** Text and token ids go to the head alone: only it has the embedding. */
export function checkHead(what: string, { span }: NodeFacts): void {
  if (isHead(span)) return;
  throw new UserError(
    "unsupported_spelling",
    `${what} came to a node that holds layers ${formatSpan(span)} of ${span.total}, which takes hidden states`,
    "send it to the head: the node that holds layer 0",
  );
}

/** Before anything is made of the rows: a body can name a great many of them. */
export function checkRowCount(count: number, { maxRows }: NodeFacts): void {
  if (count <= maxRows) return;
  throw new UserError("impossible", `the call has ${count} rows, and this node takes ${maxRows}`, "send several calls");
}

/** What concerns the call as a whole, before anything is looked at row by row. */
export function checkSizes({ lengths, payload }: Draft, node: NodeFacts): void {
  checkRowCount(lengths.length, node);
  if (sum(lengths) === 0) {
    throw new UserError("empty_prompt", "the call has no token in any row", "send at least one token");
  }
  if (payload.kind === "ids" || payload.hiddenSize === node.hiddenSize) return;
  throw new UserError(
    "hidden_size",
    `the hidden states are ${payload.hiddenSize} wide, and this model's hidden size is ${node.hiddenSize}`,
    "send hidden states of the same model",
  );
}

/** Why a row, whose first token is number `first` of all T, cannot run; undefined where it can. */
export function rowProblem(draft: Draft, node: NodeFacts, row: number, first: number): UserError | undefined {
  const { payload, tokenIds } = draft;
  const length = draft.lengths[row]!;
  const slot = draft.rectangle ? firstSlot(draft.rectangle, row) : 0;
  const ids = payload.kind === "ids" ? payload.ids : tokenIds;
  return (
    lengthProblem(draft, node, row) ??
    stopProblem(draft, node, row) ??
    (ids && idProblem(ids.subarray(first, first + length), node, row, slot)) ??
    (payload.kind === "hidden" ? valueProblem(payload, first, length, row, slot) : undefined)
  );
}

function lengthProblem({ lengths, fields }: Draft, { maxContext }: NodeFacts, row: number): UserError | undefined {
  const { positionStart = 0, maxLen } = fields[row] ?? {};
  const end = positionStart + lengths[row]!;
  const longest = Math.max(end, maxLen ?? 0);
  if (longest <= maxContext) return undefined;
  return new UserError(
    "context_exceeded",
    `row ${row} ${end > maxContext ? "reaches" : "asks for room for"} ${longest} tokens, and this node's context is ${maxContext}`,
    end > maxContext
      ? "send fewer tokens"
      : `ask for room for at most ${maxContext} tokens (max_len), or leave it away: that is the default`,
    { details: { row } },
  );
}

function stopProblem({ fields }: Draft, { vocabSize }: NodeFacts, row: number): UserError | undefined {
  const id = fields[row]?.sampling?.stop_token_ids?.find((stop) => stop >= vocabSize);
  if (id === undefined) return undefined;
  return new UserError(
    "token_id",
    `row ${row} has ${id} in its stop_token_ids, and the vocabulary is 0 to ${vocabSize - 1}`,
    "give ids of this model's tokenizer",
    { details: { row } },
  );
}

function idProblem(ids: Int32Array, { vocabSize }: NodeFacts, row: number, slot: number): UserError | undefined {
  const at = ids.findIndex((id) => id < 0 || id >= vocabSize);
  if (at < 0) return undefined;
  return new UserError(
    "token_id",
    `row ${row} has the token id ${ids[at]} at slot ${slot + at}, and the vocabulary is 0 to ${vocabSize - 1}`,
    "tokenize with this model's tokenizer",
    { details: { row } },
  );
}

/**
 * A NaN would spread over every later token of its row and come out as a plausible token id, so it is refused where it
 * enters. One in a padded slot has been stripped by now, and does no harm.
 */
function valueProblem(
  { values, hiddenSize }: Extract<Payload, { kind: "hidden" }>,
  first: number,
  length: number,
  row: number,
  slot: number,
): UserError | undefined {
  const at = firstNonFinite(values, first * hiddenSize, (first + length) * hiddenSize);
  if (at < 0) return undefined;
  return new UserError(
    "non_finite",
    `the hidden states have a NaN or an infinity in row ${row} at slot ${slot + Math.floor(at / hiddenSize) - first}`,
    "a value before this node left the range of bfloat16: look at the node that sent it",
    { details: { row } },
  );
}

function firstNonFinite(values: Uint16Array, begin: number, end: number): number {
  for (let i = begin; i < end; i++) {
    if ((values[i]! & 0x7f80) === 0x7f80) return i; // an exponent of ones: infinity or NaN
  }
  return -1;
}
