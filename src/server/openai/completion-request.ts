import { UserError } from "../../base/errors.ts";
import { quote } from "../../base/quote.ts";
import { MOST_LOGPROBS } from "../../protocol/sampling.ts";
import type { Tokenizer } from "../../tokenizer/tokenizer.ts";
import { type Fields, impossible, lacking } from "./fields.ts";
import { checkLength, type Prompt, readCommon, type TextFacts, type TextRequest, tokensAfter } from "./text-request.ts";

/** OpenAI's default. */
const USUAL_TOKENS = 16;
/** Of one call. */
const MOST_PROMPTS = 1024;

/** The body of `POST /v1/completions`. Throws UserError with the `param`, or the signal's reason. */
export async function readCompletionRequest(
  fields: Fields,
  tokenizer: Tokenizer,
  facts: TextFacts & { readonly signal: AbortSignal },
): Promise<TextRequest> {
  const common = readCommon(fields, facts);
  if ((fields.get("suffix") ?? "") !== "") throw lacking("suffix", "is not supported", "leave it away");
  const bestOf = fields.count("best_of", 1) ?? 1;
  if (bestOf > common.choices) {
    throw lacking("best_of", `is ${bestOf}, and nothing is chosen among more than n texts`, "ask for n texts instead");
  }
  const logprobs = fields.count("logprobs", 0, MOST_LOGPROBS);
  const echo = fields.flag("echo") ?? false;
  const prompts = await readPrompts(fields, tokenizer, facts);
  const usual = facts.defaults.maxNewTokens ?? USUAL_TOKENS;
  const length = { asked: fields.count("max_tokens", 0), usual, param: "prompt" };
  return {
    ...common,
    prompts,
    maxTokens: tokensAfter(prompts, length, facts),
    sampling: { ...common.sampling, ...(logprobs !== undefined && { logprobs }) },
    echo,
    continues: true,
  };
}

/** A text, texts, token ids, or lists of token ids. Between two of them others have their turn. */
async function readPrompts(
  fields: Fields,
  tokenizer: Tokenizer,
  facts: TextFacts & { readonly signal: AbortSignal },
): Promise<Prompt[]> {
  const value = fields.get("prompt");
  if (value === undefined) throw impossible("prompt", "is missing", SHAPE);
  const isIds = Array.isArray(value) && value.length > 0 && value.every((item) => typeof item === "number");
  const items: unknown[] = Array.isArray(value) && !isIds ? value : [value];
  if (items.length === 0) throw empty("prompt is an empty list");
  if (items.length > MOST_PROMPTS) {
    throw impossible(
      "prompt",
      `is a list of ${items.length}, and ${MOST_PROMPTS} are the most`,
      "send fewer in one call",
    );
  }
  const addSpecialTokens = fields.flag("add_special_tokens") ?? true;
  const prompts: Prompt[] = [];
  for (const item of items) {
    if (prompts.length > 0) await new Promise((resolve) => setImmediate(resolve));
    facts.signal.throwIfAborted();
    prompts.push(readPrompt(item, { tokenizer, facts, addSpecialTokens }));
  }
  return prompts;
}

function readPrompt(
  item: unknown,
  { tokenizer, facts, addSpecialTokens }: { tokenizer: Tokenizer; facts: TextFacts; addSpecialTokens: boolean },
): Prompt {
  if (Array.isArray(item)) return promptOfIds(item, tokenizer, facts);
  if (typeof item !== "string") throw impossible("prompt", `has ${quote(item)}`, SHAPE);
  checkLength(item.length, "prompt", facts);
  const text = item.toWellFormed();
  const ids = Int32Array.from(tokenizer.encode(text, { addSpecialTokens }));
  if (ids.length === 0) throw empty("a prompt has no token");
  return { ids, text };
}

const SHAPE = "send a text, a list of texts, a list of token ids, or a list of those";

function promptOfIds(ids: readonly unknown[], tokenizer: Tokenizer, { vocabSize }: TextFacts): Prompt {
  if (ids.length === 0) throw empty("a prompt has no token");
  const wrong = ids.find((id) => !Number.isInteger(id) || (id as number) < 0 || (id as number) >= vocabSize);
  if (wrong !== undefined) {
    const problem = `has the token id ${quote(wrong)}, and this model's go from 0 to ${vocabSize - 1}`;
    throw impossible("prompt", problem, "tokenize with this model's tokenizer");
  }
  const all = Int32Array.from(ids as number[]);
  return { ids: all, text: tokenizer.decode(all) };
}

const empty = (problem: string): UserError =>
  new UserError("empty_prompt", problem, "send at least one token", { details: { param: "prompt" } });
