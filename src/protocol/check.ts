import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan, isHead } from "../base/span.ts";
import type { CallFields } from "./headers.ts";
import type { Draft, NodeFacts } from "./message.ts";
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
      `the call is for the model ${model}, and this node holds ${node.model}`,
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

export function checkLengths({ lengths, fields }: Draft, node: NodeFacts): void {
  checkRowCount(lengths.length, node);
  if (sum(lengths) === 0) {
    throw new UserError("empty_prompt", "the call has no token in any row", "send at least one token");
  }
  lengths.forEach((tokens, row) => {
    const end = (fields[row]?.positionStart ?? 0) + tokens;
    if (end <= node.maxContext) return;
    throw new UserError(
      "context_exceeded",
      `row ${row} reaches ${end} tokens, and this node's context is ${node.maxContext}`,
      "send fewer tokens",
      { details: { row } },
    );
  });
}

export function checkPayload(draft: Draft, node: NodeFacts): void {
  const { payload } = draft;
  switch (payload.kind) {
    case "ids": {
      const at = payload.ids.findIndex((id) => id < 0 || id >= node.vocabSize);
      if (at < 0) return;
      const { row, slot } = placeOf(at, draft);
      throw new UserError(
        "token_id",
        `row ${row} has the token id ${payload.ids[at]} at slot ${slot}, and the vocabulary is 0 to ${node.vocabSize - 1}`,
        "tokenize with this model's tokenizer",
        { details: { row } },
      );
    }
    case "hidden": {
      if (payload.hiddenSize !== node.hiddenSize) {
        throw new UserError(
          "hidden_size",
          `the hidden states are ${payload.hiddenSize} wide, and this model's hidden size is ${node.hiddenSize}`,
          "send hidden states of the same model",
        );
      }
      const at = firstNonFinite(payload.values);
      if (at < 0) return;
      const { row, slot } = placeOf(Math.floor(at / payload.hiddenSize), draft);
      throw new UserError(
        "non_finite",
        `the hidden states have a NaN or an infinity in row ${row} at slot ${slot}`,
        "a value before this node left the range of bfloat16: look at the node that sent it",
        { details: { row } },
      );
    }
  }
}

/**
 * A NaN would spread over every later token of its row and come out as a plausible token id, so it is refused where it
 * enters. One in a padded slot has been stripped by now, and does no harm.
 */
function firstNonFinite(values: Uint16Array): number {
  for (let i = 0; i < values.length; i++) {
    if ((values[i]! & 0x7f80) === 0x7f80) return i; // an exponent of ones: infinity or NaN
  }
  return -1;
}

/** Where the token `index` of all T lay in the call. */
function placeOf(index: number, { lengths, rectangle }: Draft): { row: number; slot: number } {
  let row = 0;
  let left = index;
  while (left >= lengths[row]!) left -= lengths[row++]!;
  return { row, slot: left + (rectangle ? firstSlot(rectangle, row) : 0) };
}
