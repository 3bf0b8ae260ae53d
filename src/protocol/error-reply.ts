/** The body of every error reply: `{"error": {…}}`. */
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
  ) {
    super(`node ${body.node} (layers ${body.layers}) answered ${status} ${body.code}: ${body.message}`);
    this.name = "RemoteError";
  }
}

/** Undefined where it is not the error reply of a meshnet node. */
export function parseErrorReply(status: number, headers: Headers, text: string): RemoteError | undefined {
  let error: unknown;
  try {
    error = (JSON.parse(text) as { error?: unknown } | null)?.error;
  } catch {
    return undefined; // the caller says what came instead
  }
  if (typeof error !== "object" || error === null) return undefined;
  const fields = error as Record<string, unknown>;
  const isText = (name: string) => typeof fields[name] === "string";
  if (!["code", "message", "hint", "node", "layers"].every(isText)) return undefined;
  return new RemoteError(status, fields as unknown as ErrorBody, headers.get("Retry-After"));
}
