import { dirname } from "node:path";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { hashOf, type HubClient, type ListedFile } from "./client.ts";
import { ContentChanged, HubContent } from "./content.ts";
import { checkDiskSpace, diskProblem } from "./disk.ts";
import { fetchRanges, type RangeJob, type Transfer } from "./fetch-ranges.ts";
import type { DownloadProgress } from "./progress.ts";
import type { RangeStore, StoredFile } from "./range-store.ts";
import { byteCount, type ByteRange, joined } from "./ranges.ts";

/** Bytes of a listed file that are wanted. */
export interface WantedPart {
  readonly file: ListedFile;
  readonly ranges: readonly ByteRange[];
}

export interface PartSource {
  /** None where the node is offline. */
  readonly client: HubClient | undefined;
  readonly store: RangeStore;
  readonly modelId: string;
  readonly commit: string;
  readonly transfer: Transfer;
  readonly log: Logger;
}

export interface PartDownload {
  readonly progress: DownloadProgress;
  /** For the progress: how large all the weights are. */
  readonly checkpointBytes: number;
}

/**
 * Brings the wanted bytes into the store, where `uses` keeps them from being deleted. What is there costs nothing, and
 * no network. Throws UserError `download`.
 */
export async function ensureParts(
  wanted: readonly WantedPart[],
  source: PartSource,
  uses: UseLocks,
  download: PartDownload,
): Promise<void> {
  const parts = wanted.map(({ file, ranges }) => ({ file, ranges, stored: storedFile(file, source) }));
  if (!source.client) refuseIfMissing(parts, source);
  try {
    for (const part of parts) {
      await uses.hold(part.stored);
      touch(part, source);
    }
    const lacking = parts.filter(({ stored, ranges }) => stored.missing(ranges).length > 0);
    if (source.client && lacking.length > 0) await fetchParts(lacking, { ...source, client: source.client }, download);
  } catch (error) {
    throw diskProblem(error, `what is fetched of ${source.modelId}`) ?? error;
  }
}

/** Files that are being read: no other process deletes them until this is disposed of. */
export class UseLocks implements Disposable {
  readonly #held = new Map<string, Disposable>();

  async hold(stored: StoredFile): Promise<void> {
    while (!this.#held.has(stored.path)) {
      const held = stored.use();
      if (held) this.#held.set(stored.path, held);
      else await Bun.sleep(20); // it is being deleted, or looked at by who lists the store
    }
  }

  [Symbol.dispose](): void {
    for (const held of this.#held.values()) held[Symbol.dispose]();
    this.#held.clear();
  }
}

/** What would be asked of the Hub for these bytes: those that are not here, and small gaps between them. */
export function rangesToFetch({ file, ranges }: WantedPart, source: PartSource): ByteRange[] {
  const stored = storedFile(file, source);
  const gaps = joined(stored.missing(ranges), source.transfer.gapBytes);
  return stored.missing(gaps); // not again what lies between
}

export const storedFile = (file: ListedFile, { store }: PartSource): StoredFile => store.file(hashOf(file), file.size);

interface StoredPart extends WantedPart {
  readonly stored: StoredFile;
}

async function fetchParts(
  parts: readonly StoredPart[],
  source: PartSource & { client: HubClient },
  { progress, checkpointBytes }: PartDownload,
): Promise<void> {
  const { client, modelId, commit, transfer, log } = source;
  await using cleanup = new AsyncDisposableStack();
  // In an order that is everybody's, so that no two wait for each other.
  for (const { file, stored } of parts.toSorted((a, b) => (hashOf(a.file) < hashOf(b.file) ? -1 : 1))) {
    const waits = (pid?: number) =>
      log.info("waiting for another process that fetches the same file", { file: file.name, pid });
    cleanup.use(await stored.lockDownload(waits));
  }
  const plans = parts.map((part) => ({ ...part, fetch: rangesToFetch(part, source) })); // others may have fetched some
  const fetchBytes = byteCount(plans.flatMap((plan) => plan.fetch));
  if (fetchBytes === 0) return;
  const folder = dirname(plans[0]!.stored.path);
  await checkDiskSpace(folder, fetchBytes, `fetching ${formatBytes(fetchBytes)} of ${modelId}`);

  const jobs: RangeJob[] = [];
  for (const { file, stored, fetch } of plans.filter((plan) => plan.fetch.length > 0)) {
    const target = cleanup.use(await stored.openToWrite());
    const content = new HubContent(client, { modelId, commit, file, memory: stored });
    jobs.push({ what: `${file.name} of ${modelId}`, content, target, ranges: fetch });
  }
  progress.begin({ modelId, fetchBytes, checkpointBytes });
  try {
    await fetchRanges(jobs, { client, transfer, onBytes: (bytes) => progress.advance(bytes) });
  } catch (error) {
    progress.fail();
    if (error instanceof ContentChanged) storedFile(error.file, source).forget();
    throw error;
  }
  progress.end();
}

function touch({ file, stored }: StoredPart, { modelId, commit }: PartSource): void {
  stored.info = { size: file.size, modelId, file: file.name, commit, usedAt: new Date().toISOString() };
}

function refuseIfMissing(parts: readonly StoredPart[], { modelId, commit }: PartSource): void {
  for (const { file, stored, ranges } of parts) {
    const missing = byteCount(stored.missing(ranges));
    if (missing === 0) continue;
    throw new UserError(
      "download",
      `${formatBytes(missing)} of ${file.name} of ${modelId}@${commit} are not in the cache, and this node is offline`,
      "run once without --offline",
    );
  }
}
