import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { type ErrorBody, RemoteError, retryAfterOf, statusOf } from "../protocol/error-reply.ts";
import type { FrameRow } from "../protocol/frame.ts";
import type { RowResult } from "../protocol/reply.ts";
import type { Admission } from "./admission.ts";

/** One row to send on, with whose it is. */
export interface HopRow {
  readonly row: FrameRow;
  /** [n, hiddenSize] bfloat16 */
  readonly values: Uint16Array;
  /** [n] */
  readonly tokenIds?: Int32Array;
  readonly requestId: string;
  readonly route?: readonly string[];
  /** When the caller's patience is at its end, in `performance.now()`; undefined: the hop's own timeout. */
  readonly deadline?: number;
  /** Aborted when the caller is gone, or with a UserError when its patience is at its end. */
  readonly signal: AbortSignal;
}

export interface HopResult {
  readonly result: RowResult;
  /** The layer after the last one the result went through. */
  readonly end: number;
}

/** Where the next node does not say what it takes (`max_rows`, `max_body_bytes` of `/info`). */
const DEFAULT_MAX_ROWS = 1024;
const DEFAULT_MAX_BYTES = 64 << 20;

interface Waiting extends HopRow {
  readonly resolve: (result: HopResult) => void;
  readonly reject: (error: unknown) => void;
}

/**
 * Sends rows to the next node, and those that come in the same turn of the event loop in one frame: so the sessions whose
 * steps ran here in one pass run in one pass there too. Each row gets its own result or error. A caller that goes away
 * takes its own row with it and no other; the frame is given up when nobody waits for any of its rows.
 */
export class FrameBatcher {
  readonly #admission: Admission;
  /** What waits for the end of this turn, by what can go together. */
  readonly #waiting = new Map<string, Waiting[]>();
  /** Frames on their way, by the sessions whose rows are in them. */
  readonly #out = new Map<string, Set<Promise<void>>>();

  constructor(admission: Admission) {
    this.#admission = admission;
  }

  /**
   * Throws UserError `next_unreachable`, `next_nonsense` or `deadline`, the RemoteError of a later node, or the signal's
   * reason.
   */
  send(row: HopRow): Promise<HopResult> {
    return new Promise((resolve, reject) => {
      if (this.#waiting.size === 0) setImmediate(() => this.#flush());
      const kind = kindOf(row);
      const group = this.#waiting.get(kind);
      const waiting = { ...row, resolve, reject };
      if (group) group.push(waiting);
      else this.#waiting.set(kind, [waiting]);
    });
  }

  /** Resolves when no frame with a row of these sessions is on its way any more; undefined where none is. */
  settled(isMeant: (session: string) => boolean): Promise<void> | undefined {
    const frames = [...this.#out].flatMap(([session, frames]) => (isMeant(session) ? [...frames] : []));
    return frames.length === 0 ? undefined : Promise.all(frames).then(() => {});
  }

  #flush(): void {
    const groups = [...this.#waiting.values()];
    this.#waiting.clear();
    for (const group of groups) {
      const live = group.filter(({ signal, reject }) => {
        if (signal.aborted) reject(signal.reason);
        return !signal.aborted;
      });
      for (const rows of this.#frames(live)) this.#track(rows, this.#sendFrame(rows));
    }
  }

  /** Cut where a frame or its reply would be more than the next node takes. */
  #frames(rows: readonly Waiting[]): Waiting[][] {
    const { max_rows: maxRows = DEFAULT_MAX_ROWS, max_body_bytes: maxBody = DEFAULT_MAX_BYTES } =
      this.#admission.node ?? {};
    const maxBytes = Math.min(maxBody, DEFAULT_MAX_BYTES) * 0.9; // the rest is for the header
    const { vocabSize } = this.#admission.next.own;
    const frames: Waiting[][] = [];
    let bytes = Infinity;
    for (const row of rows) {
      const size = Math.max(row.values.byteLength + row.row.tokens * 4, replyBytes(row.row, vocabSize));
      const last = frames.at(-1);
      if (last && last.length < maxRows && bytes + size <= maxBytes) {
        last.push(row);
        bytes += size;
      } else {
        frames.push([row]);
        bytes = size;
      }
    }
    return frames;
  }

  #track(rows: readonly Waiting[], frame: Promise<void>): void {
    for (const { row } of rows) {
      const { session } = row;
      if (session === undefined) continue;
      const frames = this.#out.get(session) ?? new Set();
      this.#out.set(session, frames.add(frame));
      void frame.then(() => {
        frames.delete(frame);
        if (frames.size === 0 && this.#out.get(session) === frames) this.#out.delete(session);
      });
    }
  }

  /** Never rejects: what goes wrong is the rows' affair. */
  async #sendFrame(rows: readonly Waiting[]): Promise<void> {
    const { next } = this.#admission;
    const gone = new AbortController();
    let here = rows.length;
    const leaves = rows.map(({ signal, reject }) => () => {
      reject(this.#late(signal.reason));
      if (--here === 0) gone.abort(signal.reason);
    });
    rows.forEach(({ signal }, i) => signal.addEventListener("abort", leaves[i]!, { once: true }));
    try {
      const { outcomes, end, node } = await next.forward({
        rows: rows.map(({ row }) => row),
        values: join(rows.map(({ values }) => values)),
        tokenIds: rows[0]!.tokenIds && join(rows.map(({ tokenIds }) => tokenIds!)),
        requestId: rows[0]!.requestId,
        route: rows[0]!.route,
        deadlineMs: patience(rows),
        signal: gone.signal,
      });
      this.#admission.seen(node);
      outcomes.forEach((outcome, i) => {
        if (outcome.kind === "error") rows[i]!.reject(remoteError(outcome.error));
        else rows[i]!.resolve({ result: outcome, end });
      });
    } catch (error) {
      if (error instanceof UserError || error instanceof RemoteError) this.#admission.recheck();
      for (const { reject } of rows) reject(error); // those that have gone have theirs
    } finally {
      rows.forEach(({ signal }, i) => signal.removeEventListener("abort", leaves[i]!));
    }
  }

  /** A deadline that passes while the next node works names it. */
  #late(reason: unknown): unknown {
    if (!(reason instanceof UserError) || reason.code !== "deadline") return reason;
    const { url } = this.#admission.next;
    return new UserError(
      "deadline",
      `${reason.message}: the next node ${url} has not answered`,
      "give more time (X-Meshnet-Deadline-Ms), or look at that node's log",
      { cause: reason, details: { ...reason.details, hop: url } },
    );
  }
}

/** Rows that may share a frame: replies of values are of one kind, and token ids are given for all rows or for none. */
function kindOf({ row, route, tokenIds }: HopRow): string {
  const want = row.want === "none" ? "token" : row.want;
  return JSON.stringify([want, tokenIds !== undefined, route]);
}

function replyBytes({ want, tokens }: FrameRow, vocabSize: number): number {
  if (want === "all_logits") return tokens * vocabSize * 2;
  return want === "logits" ? vocabSize * 2 : 0; // hidden states are as long as what is sent
}

/** The longest of all: each row looks at its own by itself. */
function patience(rows: readonly HopRow[]): number | undefined {
  const now = performance.now();
  const left = Math.max(...rows.map(({ deadline = Infinity }) => deadline - now));
  return left === Infinity ? undefined : left;
}

function join<T extends Uint16Array | Int32Array>(parts: readonly T[]): T {
  if (parts.length === 1) return parts[0]!;
  const length = sum(parts.map((part) => part.length));
  const joined = (parts[0] instanceof Uint16Array ? new Uint16Array(length) : new Int32Array(length)) as T;
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

/** The row's number in the frame means nothing to its caller. */
function remoteError(error: ErrorBody): RemoteError {
  const { row: _, ...body } = error;
  const status = statusOf(body.code);
  return new RemoteError(status, body as ErrorBody, retryAfterOf(status));
}
