import { sum } from "../../base/bytes.ts";
import { UserError } from "../../base/errors.ts";
import { MOST_LOGPROBS } from "../../protocol/sampling.ts";
import { type ChatMessage, checkMessages } from "../../tokenizer/chat-messages.ts";
import type { ChatTemplate } from "../../tokenizer/chat-template.ts";
import { type Fields, impossible, lacking } from "./fields.ts";
import { checkLength, readCommon, type TextFacts, type TextRequest, tokensAfter } from "./text-request.ts";

/** The body of `POST /v1/chat/completions`. Throws UserError with the `param`. */
export function readChatRequest(fields: Fields, template: ChatTemplate, facts: TextFacts): TextRequest {
  const common = readCommon(fields, facts);
  const tools = readTools(fields);
  const logprobs = fields.flag("logprobs") ?? false;
  const top = fields.count("top_logprobs", 0, MOST_LOGPROBS);
  if (top !== undefined && !logprobs) {
    throw impossible("top_logprobs", "came without logprobs", "set logprobs to true, or leave top_logprobs away");
  }
  const asked = fields.count("max_completion_tokens", 1) ?? fields.count("max_tokens", 1);
  const messages = aboutParam("messages", () => checkMessages(fields.get("messages")));
  checkLength(sum(messages.map(lengthOf)), "messages", facts);
  const variables = fields.object("chat_template_kwargs");
  const { ids, text } = aboutParam("messages", () => template.encode(messages, { tools, variables }));
  const prompts = [{ ids: Int32Array.from(ids), text }];
  const usual = facts.defaults.maxNewTokens ?? Infinity;
  return {
    ...common,
    prompts,
    maxTokens: tokensAfter(prompts, { asked, usual, param: "messages" }, facts),
    sampling: { ...common.sampling, ...(logprobs && { logprobs: top ?? 0 }) },
    echo: false,
    continues: false,
  };
}

/**
 * Tools of a call that may use them are refused: what a model writes to use one is a text of its own kind, which nothing here reads, so
 * no `tool_calls` would come of it. With `tool_choice: "none"` the model is told of them, and answers in words.
 */
function readTools(fields: Fields): readonly unknown[] | undefined {
  const tools = fields.get("tools");
  if (tools !== undefined && !Array.isArray(tools)) throw impossible("tools", "is not a list", "leave it away");
  const functions = fields.get("functions");
  const isAsked = tools !== undefined && tools.length > 0 && fields.get("tool_choice") !== "none";
  if (!isAsked && !(Array.isArray(functions) && functions.length > 0)) return tools;
  throw lacking(
    isAsked ? "tools" : "functions",
    "are not supported: no tool_calls are made of what the model writes",
    'leave them away, or give tools with tool_choice "none" and read the answer\'s text yourself',
  );
}

/** Characters. */
const lengthOf = (message: ChatMessage): number => JSON.stringify(message).length;

/** Whoever reads messages and templates does not know what the parameter is called. */
function aboutParam<T>(param: string, work: () => T): T {
  try {
    return work();
  } catch (error) {
    if (!(error instanceof UserError)) throw error;
    throw new UserError(error.code, error.message, error.hint, {
      cause: error.cause,
      details: { ...error.details, param },
    });
  }
}
