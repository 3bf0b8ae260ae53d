import { UserError } from "../base/errors.ts";
import { parseJson } from "../base/json.ts";
import { quote } from "../base/quote.ts";

/** A message of a conversation. Other fields (`tool_calls`, `name`, …) go to the template as they are. */
export interface ChatMessage {
  readonly role: string;
  readonly content: string | readonly TextPart[] | null;
  readonly [field: string]: unknown;
}

export interface TextPart {
  readonly type: "text";
  readonly text: string;
}

/**
 * Checks a parsed `messages`. A role is a short word, because templates make role markers of it. Arguments of tool calls
 * that are JSON in a string, as OpenAI has them, become objects, as templates expect them.
 *
 * Throws UserError `malformed` with the message's place, `not_supported` for images and other parts that are not text.
 */
export function checkMessages(value: unknown): ChatMessage[] {
  if (!Array.isArray(value)) throw malformed("messages is not a list", SHAPE);
  if (value.length === 0) throw malformed("messages is empty", "send at least one message");
  return value.map((message: unknown, index) => checkMessage(message, `messages[${index}]`));
}

const SHAPE = 'write messages as [{"role": "user", "content": "…"}, …]';

function checkMessage(message: unknown, where: string): ChatMessage {
  if (typeof message !== "object" || message === null || Array.isArray(message)) {
    throw malformed(`${where} is not an object`, SHAPE);
  }
  const { role, content = null, tool_calls, ...rest } = message as Record<string, unknown>;
  if (typeof role !== "string" || !/^[A-Za-z][\w-]{0,31}$/.test(role)) {
    throw malformed(`${where}.role is ${quote(role)}`, "a role is a word like system, user or assistant");
  }
  const calls = Array.isArray(tool_calls) ? { tool_calls: tool_calls.map(withParsedArguments) } : {};
  if (content === null && !("tool_calls" in calls)) {
    throw malformed(`${where} has no content`, "give content as a text, or as a list of parts of type text");
  }
  return { ...rest, role, content: content === null ? null : checkContent(content, `${where}.content`), ...calls };
}

function checkContent(content: unknown, where: string): string | TextPart[] {
  if (typeof content === "string") return content.toWellFormed();
  if (!Array.isArray(content)) throw malformed(`${where} is neither a text nor a list of parts`, SHAPE);
  return content.map((part: unknown, index) => {
    const { type, text } = (part ?? {}) as Record<string, unknown>;
    if (typeof type === "string" && type !== "text") {
      const hint = "send text only: this server reads no images, sound or files";
      throw new UserError("not_supported", `${where}[${index}] is of the type ${type.slice(0, 40)}`, hint);
    }
    if (type === "text" && typeof text === "string") return { type, text: text.toWellFormed() };
    throw malformed(`${where}[${index}] is not a part of type text`, 'write it as {"type": "text", "text": "…"}');
  });
}

function withParsedArguments(call: unknown): unknown {
  const named = (call as { function?: { arguments?: unknown } } | null)?.function;
  if (typeof named?.arguments !== "string") return call;
  try {
    return { ...(call as object), function: { ...named, arguments: parseJson(named.arguments) } };
  } catch {
    return call;
  }
}

const malformed = (message: string, hint: string): UserError => new UserError("malformed", message, hint);
