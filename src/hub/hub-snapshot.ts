import { linkSync, rmSync } from "node:fs";
import { open } from "node:fs/promises";
import { join } from "node:path";
import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { copyWhole, type ModelCache } from "./cache.ts";
import { hashOf, type ListedFile } from "./client.ts";
import { HubContent } from "./content.ts";
import { diskProblem } from "./disk.ts";
import { contentHasher, downloadBlob, otherContent } from "./download.ts";
import {
  type PartDownload,
  type PartSource,
  ensureParts,
  rangesToFetch,
  storedFile,
  UseLocks,
  type WantedPart,
} from "./parts.ts";
import { silentProgress } from "./progress.ts";
import { byteCount } from "./ranges.ts";
import type { FilePart, ModelFile, Snapshot } from "./snapshot.ts";

export interface HubModel extends PartSource {
  readonly cache: ModelCache;
  readonly listing: ReadonlyMap<string, ListedFile>;
}

/** A model of the Hub at one commit: whole files in the cache that all tools share, parts of files in our own. */
export class HubSnapshot implements Snapshot {
  readonly modelId: string;
  readonly revision: string;
  readonly directory: string;
  readonly files: readonly ModelFile[];
  readonly #model: HubModel;
  readonly #uses = new UseLocks();

  constructor(model: HubModel) {
    this.#model = model;
    this.modelId = model.modelId;
    this.revision = model.commit;
    this.directory = model.cache.snapshotDirectory(model.commit);
    this.files = [...model.listing.values()].map(({ name, size, sha256 }) => ({ name, size, sha256 }));
  }

  async fetch(names: readonly string[], download: PartDownload = QUIETLY): Promise<void> {
    const missing = names.map((name) => this.#listed(name)).filter((file) => !this.#isWhole(file));
    if (missing.length === 0) return;
    if (!this.#model.client) throw notCached(`${missing[0]!.name} of ${this.modelId}@${this.revision}`);
    const [small, large] = [missing.filter(isSmall), missing.filter((file) => !isSmall(file))];
    for (const file of small) await this.#downloadWhole(file);
    await this.#downloadInParts(large, download);
    for (const file of missing) this.#model.cache.link(file, this.revision);
  }

  pathOf(name: string): string {
    const file = this.#model.listing.get(name);
    return file && !this.#isWhole(file) ? storedFile(file, this.#model).path : join(this.directory, name);
  }

  missingBytes(parts: readonly FilePart[]): { wanted: number; fetch: number } {
    const lacking = this.#notWhole(parts);
    return {
      wanted: byteCount(lacking.flatMap(({ file, ranges }) => storedFile(file, this.#model).missing(ranges))),
      fetch: byteCount(lacking.flatMap((part) => rangesToFetch(part, this.#model))),
    };
  }

  async ensure(parts: readonly FilePart[], download: PartDownload = QUIETLY): Promise<void> {
    await ensureParts(this.#notWhole(parts), this.#model, this.#uses, download);
  }

  [Symbol.dispose](): void {
    this.#uses[Symbol.dispose]();
  }

  #listed(name: string): ListedFile {
    const file = this.#model.listing.get(name);
    if (file) return file;
    throw new UserError(
      "download",
      `${this.modelId}@${this.revision} has no file ${name}`,
      "choose another revision with --revision",
    );
  }

  #notWhole(parts: readonly FilePart[]): WantedPart[] {
    const wanted = parts.map(({ name, ranges }) => ({ file: this.#listed(name), ranges }));
    return wanted.filter(({ file }) => !this.#isWhole(file));
  }

  /** In the shared cache, perhaps from another commit. */
  #isWhole(file: ListedFile): boolean {
    const { cache } = this.#model;
    if (cache.has(file, this.revision)) return true;
    if (!cache.hasBlob(file)) return false;
    cache.link(file, this.revision);
    return true;
  }

  async #downloadWhole(file: ListedFile, onBytes?: (bytes: number) => void): Promise<void> {
    const { client, cache, log, modelId, commit } = this.#model;
    const content = new HubContent(client!, { modelId, commit, file, memory: { etags: new Map() } });
    await downloadBlob({ client: client!, content, cache, file, what: `${file.name} of ${modelId}`, log, onBytes });
  }

  /** Through our own store, from where it goes on after an interruption; one by one if the server has no ranges. */
  async #downloadInParts(files: readonly ListedFile[], download: PartDownload): Promise<void> {
    if (files.length === 0) return;
    const parts = files.map((file) => ({ file, ranges: [{ begin: 0, end: file.size }] }));
    try {
      using uses = new UseLocks();
      await ensureParts(parts, this.#model, uses, download);
      for (const file of files) await this.#adopt(file);
    } catch (error) {
      if (!(error instanceof UserError) || !error.details["ignoresRange"]) throw error;
      await this.#downloadOneByOne(files, download);
    }
    for (const file of files) this.#model.store.remove(hashOf(file)); // unless another process reads it there
  }

  async #downloadOneByOne(files: readonly ListedFile[], { progress, checkpointBytes }: PartDownload): Promise<void> {
    progress.begin({ modelId: this.modelId, fetchBytes: sum(files.map(({ size }) => size)), checkpointBytes });
    try {
      for (const file of files) await this.#downloadWhole(file, (bytes) => progress.advance(bytes));
    } catch (error) {
      progress.fail();
      throw error;
    }
    progress.end();
  }

  /** The store's file, which is complete, becomes the shared cache's: without a copy where one disk holds both. */
  async #adopt(file: ListedFile): Promise<void> {
    const { cache } = this.#model;
    const what = `${file.name} of ${this.modelId}`;
    const stored = storedFile(file, this.#model);
    if ((await hashOfContent(stored.path, file)) !== (file.sha256 ?? file.gitSha1)) {
      stored.forget();
      throw otherContent(what);
    }
    const partial = cache.partialPath(file);
    try {
      linkOrCopy(stored.path, partial);
      cache.adoptBlob(partial, file);
    } catch (error) {
      rmSync(partial, { force: true });
      throw diskProblem(error, what) ?? error;
    }
  }
}

/** Few bytes are faster asked for at once, and no loss if they break off. */
const SMALL_BYTES = 4 * 2 ** 20;
const isSmall = ({ size }: ListedFile): boolean => size <= SMALL_BYTES;

const QUIETLY: PartDownload = { progress: silentProgress, checkpointBytes: 0 };

export const notCached = (what: string): UserError =>
  new UserError("download", `${what} is not in the cache, and this node is offline`, "run once without --offline");

function linkOrCopy(from: string, to: string): void {
  try {
    linkSync(from, to);
  } catch {
    copyWhole(from, to); // another disk, or one without links
  }
}

const CHUNK_BYTES = 4 * 2 ** 20;

async function hashOfContent(path: string, listed: ListedFile): Promise<string> {
  const hash = contentHasher(listed);
  const chunk = new Uint8Array(CHUNK_BYTES);
  await using file = await open(path, "r");
  for (;;) {
    const { bytesRead } = await file.read(chunk, 0, chunk.length);
    if (bytesRead === 0) return hash.digest("hex");
    hash.update(chunk.subarray(0, bytesRead));
  }
}
