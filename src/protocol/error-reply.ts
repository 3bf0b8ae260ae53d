import { type ErrorCode, ERRORS } from "../base/errors.ts";

/** What an error reply says: `{"error": {…}}`; in `errors` each row's own, where a call failed in all its rows. */
export interface ErrorBody {
  readonly code: string;
  readonly message: string;
  readonly hint: string;
  /** The instance id and the layers of the node that refused or failed. */
  readonly node: string;
  readonly layers: string;
  readonly [detail: string]: unknown;
}

/** What a later node of the chain answered instead of a result. It goes back to the caller as it came. */
export class RemoteError extends Error {
  constructor(
    readonly status: number,
    readonly body: ErrorBody,
    readonly retryAfter: string | null,
    /** One for each row of the call, where each row has failed for itself. */
    readonly rows?: readonly ErrorBody[],
  ) {
    super(`node ${body.node} (layers ${body.layers}) answered ${status} ${body.code}: ${body.message}`);
    this.name = "RemoteError";
  }
}

/** Undefined where it is not the error reply of a meshnet node. */
export function parseErrorReply(status: number, headers: Headers, text: string): RemoteError | undefined {
  let reply: { error?: unknown; errors?: unknown } | null;
  try {
    reply = JSON.parse(text);
  } catch {
    return undefined; // the caller says what came instead
  }
  const body = parseErrorBody(reply?.error);
  if (body === undefined) return undefined;
  const rows = Array.isArray(reply?.errors) ? reply.errors.map(parseErrorBody) : undefined;
  const all = rows?.every((row) => row !== undefined) ? rows : undefined;
  return new RemoteError(status, body, headers.get("Retry-After"), all);
}

/** Undefined where a JSON value is not an error of a meshnet node. */
export function parseErrorBody(error: unknown): ErrorBody | undefined {
  if (typeof error !== "object" || error === null) return undefined;
  const fields = error as Record<string, unknown>;
  const isText = (name: string) => typeof fields[name] === "string";
  return ["code", "message", "hint", "node", "layers"].every(isText) ? (fields as unknown as ErrorBody) : undefined;
}

/** One row's error is told without a status: its code has one. 500 for `internal`, and for codes of later versions. */
export const statusOf = (code: string): number =>
  Object.hasOwn(ERRORS, code) ? ERRORS[code as ErrorCode].status : 500;

/** In how many seconds to come back where a reply with this status says so. */
export const retryAfterOf = (status: number): string | null => (status === 429 || status === 503 ? "1" : null);
