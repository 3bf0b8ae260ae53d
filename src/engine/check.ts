import { UserError } from "../base/errors.ts";
import type { StageInfo, Step } from "./types.ts";

/**
 * A last line of defence: callers check at the border, and a kernel must never index with what they missed.
 * @returns the tokens of the input
 */
export function checkValues(input: Step["input"], { hiddenSize, vocabSize, span }: StageInfo): number {
  const tokens = input.kind === "ids" ? input.ids.length : input.hidden.length / hiddenSize;
  if (tokens === 0) throw new UserError("empty_prompt", "a row without a token", "send at least one token per row");
  if (input.kind === "hidden") {
    if (Number.isInteger(tokens)) return tokens;
    throw new UserError(
      "hidden_size",
      `${input.hidden.length} values of hidden states, and each token has ${hiddenSize}`,
      "send hidden states of this model",
    );
  }
  if (span.start !== 0) {
    throw new UserError("unsupported_spelling", "token ids for a node that is not the head", "send hidden states");
  }
  const wrong = input.ids.find((id) => id < 0 || id >= vocabSize);
  if (wrong === undefined) return tokens;
  throw new UserError(
    "token_id",
    `token id ${wrong} is outside the vocabulary of ${vocabSize}`,
    "use this model's tokenizer",
  );
}
