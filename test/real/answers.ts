import { createHash } from "node:crypto";
import { createReadStream } from "node:fs";
import { join } from "node:path";
import { tokenText } from "../../src/server/openai/token-report.ts";
import type { Tokenizer } from "../../src/tokenizer/tokenizer.ts";

/** What `recording.py` wrote: transformers' answers, in float32. */
export interface Recorded<T> {
  model_sha256: string;
  new_tokens: number;
  /** How far bfloat16 moves the gap between the two best logits in transformers itself. */
  gap_noise: { rms: number; max: number };
  texts: Record<string, number[]>;
  answers: Record<string, T & Answer>;
}

export interface Answer {
  prompt_ids: number[];
  /** Of the answer, the token that ends it included. */
  ids: number[];
  /** The second best token at each place of the answer, and how much lower its logit is. */
  runners_up: number[];
  top2_gaps: number[];
  text: string;
}

/** A token of meshnet's answer, as the chat API has it. */
export interface AnsweredToken {
  token: string;
  logprob: number;
  top_logprobs: { token: string; logprob: number }[];
}

/** The place of the first token that is another one than transformers'; where all are the same, beyond the end. */
export function divergence({ ids }: Answer, tokens: readonly AnsweredToken[], tokenizer: Tokenizer): number {
  const expected = ids.filter((id) => !tokenizer.isSpecial(id)).map((id) => tokenText(id, tokenizer));
  const longer = Math.max(expected.length, tokens.length);
  const at = Array.from({ length: longer }, (_, i) => i).find((i) => expected[i] !== tokens[i]?.token);
  return at ?? ids.length;
}

/** By how much each gap up to the first other token is another one than transformers'. */
export function movedGaps(answer: Answer, tokens: readonly AnsweredToken[], tokenizer: Tokenizer): number[] {
  const same = tokens.slice(0, divergence(answer, tokens, tokenizer));
  return same.map((token, at) => gapTo(answer.runners_up[at]!, token, tokenizer) - answer.top2_gaps[at]!);
}

/** How much likelier a token is than another one, which must be among the likeliest that were told: the gap between their logits. */
function gapTo(runnerUp: number, { logprob, top_logprobs }: AnsweredToken, tokenizer: Tokenizer): number {
  const text = tokenText(runnerUp, tokenizer);
  const other = top_logprobs.find(({ token }) => token === text);
  if (!other) throw new Error(`transformers' second best token ${JSON.stringify(text)} is not among the likeliest`);
  return logprob - other.logprob;
}

export const rmsOf = (values: readonly number[]): number =>
  Math.sqrt(values.reduce((sum, one) => sum + one * one, 0) / values.length);

export async function sha256OfWeights(directory: string): Promise<string> {
  const hash = createHash("sha256");
  for await (const chunk of createReadStream(join(directory, "model.safetensors"))) hash.update(chunk as Buffer);
  return hash.digest("hex");
}
