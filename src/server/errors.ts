import { HTTPException } from "hono/http-exception";
import { ERRORS, type ErrorCode, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { formatSpan, type Span } from "../base/span.ts";
import { type ErrorBody, RemoteError, retryAfterOf } from "../protocol/error-reply.ts";

/** Who answers: it stands in every error reply. */
export interface Answerer {
  readonly node: string;
  readonly span: Span;
}

/** The call that an error belongs to. */
interface About {
  readonly id: string;
  /** Asked again and again, and no is an ordinary answer: a line for each would fill the log. */
  readonly isProbe?: boolean;
  /** What the caller gets in place of a code and a status, where that is not what `/forward` gives. */
  readonly told?: (described: { status: number; body: ErrorBody }) => { status: number; code: string };
}

/** A call of rows of which none went well. */
export class RowErrors extends Error {
  constructor(
    /** One for each row. */
    readonly bodies: readonly ErrorBody[],
    readonly status: number,
    readonly retryAfter: string | null,
  ) {
    super(`all ${bodies.length} rows failed`);
  }
}

const CLIENT_GONE = 499; // nginx's number for it: nobody reads the reply, the log does

/** The one place where an error becomes a reply: `{"error": {code, message, hint, node, layers, …}}`. */
export function errorReply(
  error: unknown,
  who: Answerer,
  log: Logger,
  request: About & { readonly signal: AbortSignal },
): Response {
  if (request.signal.aborted) return new Response(null, { status: CLIENT_GONE });
  if (error instanceof RowErrors) {
    const { bodies, status, retryAfter } = error;
    const errors = bodies.length > 1 ? { errors: bodies } : {};
    return reply(status, { error: bodies[0]!, ...errors }, { "Retry-After": retryAfter });
  }
  const { status, body, retryAfter } = describeError(error, who, log, request);
  const allow = error instanceof UserError && error.code === "method_not_allowed" ? error.details["allowed"] : null;
  return reply(status, { error: body }, { "Retry-After": retryAfter, Allow: allow === null ? null : String(allow) });
}

/** An error as replies have it, with its status; and its line in the log. */
export function describeError(
  error: unknown,
  who: Answerer,
  log: Logger,
  { id, isProbe, told }: About,
): { status: number; body: ErrorBody; retryAfter: string | null } {
  const fact = { request: id };
  const own = { node: who.node, layers: formatSpan(who.span) };
  if (error instanceof RemoteError) {
    const { code, node, layers } = error.body;
    log.warn("a later node refused", { ...fact, code, node, layers });
    return { status: error.status, body: error.body, retryAfter: error.retryAfter };
  }
  if (error instanceof UserError) {
    const { code, message, hint, details } = error;
    const { status } = ERRORS[code];
    const body = { code, message, hint, ...own, ...details };
    // Not the message: it can quote the call.
    const said = told?.({ status, body }) ?? { code, status };
    log[isProbe ? "debug" : status >= 500 ? "warn" : "info"]("call refused", { ...fact, ...said });
    return { status, body, retryAfter: retryAfterOf(status) };
  }
  if (error instanceof HTTPException) {
    const { status, message } = error;
    log.info("call refused", { ...fact, status });
    const body = { code: codeOf(status), message, hint: "see the contract of this route", ...own };
    return { status, body, retryAfter: null };
  }
  log.error("a bug", { ...fact, stack: error instanceof Error ? error.stack : String(error) });
  const message = "this node has a bug: what went wrong is in its log";
  const body = { code: "internal", message, hint: `look for request=${id} in the log`, ...own };
  return { status: 500, body, retryAfter: null };
}

function reply(
  status: number,
  body: { error: ErrorBody; errors?: readonly ErrorBody[] },
  headers: Record<string, string | null>,
): Response {
  const given = Object.entries(headers).filter((entry): entry is [string, string] => entry[1] !== null);
  return Response.json(body, { status, headers: given });
}

/** The first code of the table with this status: exceptions of the HTTP library know only that. */
function codeOf(status: number): ErrorCode | "internal" {
  const codes = Object.keys(ERRORS) as ErrorCode[];
  return codes.find((code) => ERRORS[code].status === status) ?? "internal";
}
