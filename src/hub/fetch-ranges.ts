import type { HubClient } from "./client.ts";
import type { HubContent } from "./content.ts";
import type { RangeWriter } from "./range-store.ts";
import { type ByteRange, split } from "./ranges.ts";

/** How bytes come over: by default as suits a connection of 20 MB/s with 50 ms to an answer. */
export interface Transfer {
  /** The most that one request asks for. */
  readonly rangeBytes: number;
  /** Ranges less than this apart are asked for as one: a request costs about as much time as so many bytes. */
  readonly gapBytes: number;
  /** Requests at the same time. With `rangeBytes`, this bounds the memory that answers can take. */
  readonly inFlight: number;
}

export const TRANSFER: Transfer = { rangeBytes: 16 * 2 ** 20, gapBytes: 2 ** 20, inFlight: 4 };

/** What is to be fetched of one file. */
export interface RangeJob {
  /** For errors. */
  readonly what: string;
  readonly content: HubContent;
  readonly target: RangeWriter;
  readonly ranges: readonly ByteRange[];
}

/**
 * Fetches ranges of several files, a few at a time, straight to their places on disk. A connection that breaks is taken
 * up where it broke; a process that is killed loses at most one range's worth, whatever it had in flight. Throws
 * UserError `download`, and what the disk says; what had come until then is in the journal.
 */
export async function fetchRanges(
  jobs: readonly RangeJob[],
  { client, transfer, onBytes }: { client: HubClient; transfer: Transfer; onBytes: (bytes: number) => void },
): Promise<void> {
  const { rangeBytes, inFlight } = transfer;
  const lossBytes = Math.ceil(rangeBytes / inFlight / 2); // as many again may be on the way to the disk
  const stop = new AbortController();
  const queue = jobs.flatMap((job) => split(job.ranges, rangeBytes).map((range) => ({ job, range }))).values();
  const work = async () => {
    // All workers take from the one iterator, each the next that no other has.
    for (const { job, range } of queue) {
      if (stop.signal.aborted) return;
      await fetchRange(job, range, { client, lossBytes, onBytes, signal: stop.signal });
    }
  };
  const workers = Array.from({ length: inFlight }, () =>
    work().catch((error) => {
      stop.abort(error); // the first failure ends all, and each puts into the journal what it has
      throw error;
    }),
  );
  await Promise.allSettled(workers);
  if (stop.signal.aborted) throw stop.signal.reason;
}

interface Fetching {
  readonly client: HubClient;
  readonly lossBytes: number;
  readonly onBytes: (bytes: number) => void;
  readonly signal: AbortSignal;
}

async function fetchRange(
  { what, content, target }: RangeJob,
  { begin, end }: ByteRange,
  { client, lossBytes, onBytes, signal }: Fetching,
): Promise<void> {
  let at = begin;
  let safe = begin;
  let asked = begin;
  const settle = async () => {
    if (at > safe) await target.complete({ begin: safe, end: at });
    safe = at;
  };
  const tryOnce = async () => {
    asked = at;
    if (at === end) return; // more had come than was asked for
    try {
      for await (const piece of content.read({ begin: at, end }, signal)) {
        await target.write(piece, at);
        at += piece.length;
        onBytes(piece.length);
        if (at - safe >= lossBytes) await settle();
      }
    } finally {
      await settle().catch(() => {}); // a full disk has said so already, where it matters
    }
    if (safe < at) await settle();
  };
  await client.persist(tryOnce, { what, signal, hasProgressed: () => at > asked });
}
