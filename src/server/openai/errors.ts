import type { ErrorBody } from "../../protocol/error-reply.ts";

/** An error as OpenAI has it. */
export interface OpenAiError {
  readonly message: string;
  readonly type: string;
  /** The parameter that is wrong. */
  readonly param: string | null;
  readonly code: string | null;
}

/** What this node says of an error, and with which status. */
interface Described {
  readonly status: number;
  readonly body: ErrorBody;
}

/**
 * The same error in OpenAI's words and with the status that its clients know: 422 is 400 there; a conflict inside the chain is
 * none of the caller's, so it is 503. The hint stands behind the message, for there is no other place.
 */
export function toOpenAi({ status, body }: Described): { status: number; error: OpenAiError } {
  const shown = STATUSES[status] ?? status;
  const { code, message, hint, param } = body;
  const error = {
    message: `${message}; ${hint}`,
    type: typeOf(shown),
    param: typeof param === "string" ? param : null,
    code: codeOf(code, param),
  };
  return { status: shown, error };
}

/** Where OpenAI's clients look for a call's id. */
export const OPENAI_REQUEST_ID = "X-Request-Id";

/** The same for the log, which is to say what the caller got. */
export function toldByOpenAi(described: Described): { code: string; status: number } {
  const { status, error } = toOpenAi(described);
  return { code: error.code ?? described.body.code, status };
}

export function openAiErrorReply(described: Described & { readonly retryAfter: string | null }, id: string): Response {
  const { status, error } = toOpenAi(described);
  const { retryAfter } = described;
  const reply = Response.json({ error }, { status, headers: { [OPENAI_REQUEST_ID]: id } });
  if (retryAfter !== null) reply.headers.set("Retry-After", retryAfter);
  return reply;
}

const STATUSES: Readonly<Record<number, number>> = { 409: 503, 422: 400 };

function typeOf(status: number): string {
  if (status === 401) return "authentication_error";
  if (status === 403) return "permission_error";
  if (status === 429) return "rate_limit_error";
  return status < 500 ? "invalid_request_error" : "server_error";
}

/** OpenAI's word where it has one that programs look for; else this node's. */
function codeOf(code: string, param: unknown): string {
  if (code === "not_found" && param === "model") return "model_not_found";
  return CODES[code] ?? code;
}

const CODES: Readonly<Record<string, string>> = {
  context_exceeded: "context_length_exceeded",
  no_room: "rate_limit_exceeded",
  malformed: "invalid_value",
  not_supported: "unsupported_value",
};
