/**
 * Two kinds of error, told apart once. A `UserError` is the user's or the caller's situation: its code decides the
 * HTTP status and the exit code, its message says what, where and both numbers, its hint says the way out. Anything
 * else that is thrown is a bug.
 */
export class UserError extends Error {
  readonly code: ErrorCode;
  readonly hint: string;
  /** Facts for the error reply, e.g. `cache_len`, `row`, or the node and layers a later hop reported. */
  readonly details: Readonly<Record<string, unknown>>;

  constructor(
    code: ErrorCode,
    message: string,
    hint: string,
    options: { cause?: unknown; details?: Record<string, unknown> } = {},
  ) {
    super(message, { cause: options.cause });
    this.name = "UserError";
    this.code = code;
    this.hint = hint;
    this.details = options.details ?? {};
  }
}

/** Every error code with its HTTP status and the exit code of the command line. */
export const ERRORS = {
  bad_usage: { status: 400, exit: 2 },
  malformed: { status: 400, exit: 2 },
  corrupt: { status: 400, exit: 2 },
  version_mismatch: { status: 400, exit: 2 },
  unauthorized: { status: 401, exit: 1 },
  forbidden_host: { status: 403, exit: 1 },
  forbidden_origin: { status: 403, exit: 1 },
  not_found: { status: 404, exit: 1 },
  method_not_allowed: { status: 405, exit: 1 },
  unsupported_spelling: { status: 415, exit: 1 },
  model_mismatch: { status: 409, exit: 1 },
  from_layer: { status: 409, exit: 1 },
  session_lost: { status: 409, exit: 1 },
  step_conflict: { status: 409, exit: 1 },
  too_large: { status: 413, exit: 1 },
  impossible: { status: 422, exit: 1 },
  hidden_size: { status: 422, exit: 1 },
  token_id: { status: 422, exit: 1 },
  right_padding: { status: 422, exit: 1 },
  position_ids: { status: 422, exit: 1 },
  context_exceeded: { status: 422, exit: 1 },
  empty_prompt: { status: 422, exit: 1 },
  non_finite: { status: 422, exit: 1 },
  not_supported: { status: 422, exit: 1 },
  no_room: { status: 429, exit: 1 },
  next_unreachable: { status: 502, exit: 1 },
  next_nonsense: { status: 502, exit: 1 },
  not_ready: { status: 503, exit: 1 },
  draining: { status: 503, exit: 1 },
  deadline: { status: 504, exit: 1 },
  does_not_fit: { status: 507, exit: 3 },
  bad_model: { status: 500, exit: 1 },
  unsupported_model: { status: 500, exit: 1 },
  bad_range: { status: 500, exit: 2 },
  no_device: { status: 500, exit: 1 },
  device_lost: { status: 503, exit: 1 },
  download: { status: 500, exit: 1 },
  port_in_use: { status: 500, exit: 1 },
} as const satisfies Record<string, { status: number; exit: number }>;

export type ErrorCode = keyof typeof ERRORS;

/** The text of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
