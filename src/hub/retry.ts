import { messageOf } from "../base/errors.ts";

/** Something that may go well another time: a busy Hub, a connection that broke. */
export class Transient extends Error {
  /** What to do when it never does. */
  readonly hint: string;
  /** As long as the server asked to be left alone. */
  readonly pauseMs: number | undefined;
  /** Whether there was no answer at all. */
  readonly isUnreachable: boolean;

  constructor(
    message: string,
    options: { hint?: string; pauseMs?: number; isUnreachable?: boolean; cause?: unknown } = {},
  ) {
    super(message, { cause: options.cause });
    this.hint = options.hint ?? "check the network and run it again; what has arrived is kept";
    this.pauseMs = options.pauseMs;
    this.isUnreachable = options.isUnreachable ?? false;
  }
}

/** What a failed connection said, without Bun's advice to programmers. */
export const networkMessage = (error: unknown): string =>
  messageOf(error).replace(/\.? For more information, pass .*/s, "");

export const isBusy = ({ status }: Response): boolean => status === 429 || status === 408 || status >= 500;

/** The longest that a server may ask to wait; the Hub counts requests over five minutes. */
export const LONGEST_PAUSE_MS = 10 * 60_000;

/**
 * How long an answer asks to wait: `Retry-After` in seconds or as a date, else the Hub's `RateLimit:
 * "resolvers";r=0;t=123` (draft-ietf-httpapi-ratelimit-headers) where nothing remains. Undefined where it does not say.
 */
export function askedPauseMs(headers: Headers, now: number): number | undefined {
  const after = headers.get("retry-after")?.trim();
  if (after) {
    const pauseMs = /^\d+$/.test(after) ? Number(after) * 1000 : Date.parse(after) - now;
    if (!Number.isNaN(pauseMs)) return Math.max(0, pauseMs);
  }
  const exhausted = (headers.get("ratelimit") ?? "").split(",").filter((limit) => /;\s*r=0\b/.test(limit));
  const seconds = exhausted.map((limit) => Number(/;\s*t=(\d+)/.exec(limit)?.[1] ?? Number.NaN));
  const known = seconds.filter((value) => !Number.isNaN(value));
  return known.length > 0 ? Math.max(...known) * 1000 : undefined;
}

/** Twice as long after each further failure, up to half a minute; half of it by chance, so that nodes do not return together. */
export function backoffMs(attempt: number, firstMs: number): number {
  const most = Math.min(firstMs * 2 ** (attempt - 1), 30_000);
  return most / 2 + (Math.random() * most) / 2;
}
