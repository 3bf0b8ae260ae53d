import { HTTPException } from "hono/http-exception";
import { ERRORS, type ErrorCode, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { formatSpan, type Span } from "../base/span.ts";
import { type ErrorBody, RemoteError } from "../protocol/error-reply.ts";

/** Who answers: it stands in every error reply. */
export interface Answerer {
  readonly node: string;
  readonly span: Span;
}

const CLIENT_GONE = 499; // nginx's number for it: nobody reads the reply, the log does
const RETRY_SECONDS = "1";

/** The one place where an error becomes a reply: `{"error": {code, message, hint, node, layers, …}}`. */
export function errorReply(
  error: unknown,
  who: Answerer,
  log: Logger,
  request: {
    readonly id: string;
    readonly signal: AbortSignal;
    /** Asked again and again, and no is an ordinary answer: a line for each would fill the log. */
    readonly isProbe?: boolean;
  },
): Response {
  if (request.signal.aborted) return new Response(null, { status: CLIENT_GONE });
  const fact = { request: request.id };
  const own = { node: who.node, layers: formatSpan(who.span) };

  if (error instanceof RemoteError) {
    const { code, node, layers } = error.body;
    log.warn("a later node refused", { ...fact, code, node, layers });
    return reply(error.status, error.body, { "Retry-After": error.retryAfter });
  }
  if (error instanceof UserError) {
    const { code, message, hint, details } = error;
    const { status } = ERRORS[code];
    // Not the message: it can quote the call.
    log[request.isProbe ? "debug" : status >= 500 ? "warn" : "info"]("call refused", { ...fact, code, status });
    const headers = {
      "Retry-After": status === 429 || status === 503 ? RETRY_SECONDS : null,
      Allow: code === "method_not_allowed" ? String(details["allowed"]) : null,
    };
    return reply(status, { code, message, hint, ...own, ...details }, headers);
  }
  if (error instanceof HTTPException) {
    const { status, message } = error;
    log.info("call refused", { ...fact, status });
    return reply(status, { code: codeOf(status), message, hint: "see the contract of this route", ...own });
  }
  log.error("a bug", { ...fact, stack: error instanceof Error ? error.stack : String(error) });
  const message = "this node has a bug: what went wrong is in its log";
  return reply(500, { code: "internal", message, hint: `look for request=${request.id} in the log`, ...own });
}

function reply(status: number, error: ErrorBody, headers: Record<string, string | null> = {}): Response {
  const given = Object.entries(headers).filter((entry): entry is [string, string] => entry[1] !== null);
  return Response.json({ error }, { status, headers: given });
}

/** The first code of the table with this status: exceptions of the HTTP library know only that. */
function codeOf(status: number): ErrorCode | "internal" {
  const codes = Object.keys(ERRORS) as ErrorCode[];
  return codes.find((code) => ERRORS[code].status === status) ?? "internal";
}
