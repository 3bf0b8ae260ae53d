import { randomBytes } from "node:crypto";
import {
  closeSync,
  constants,
  mkdirSync,
  openSync,
  readdirSync,
  renameSync,
  rmSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { type FileHandle, open } from "node:fs/promises";
import { join } from "node:path";
import { readText, statusOf, writeIfPossible } from "./cache.ts";
import { lock, tryLock } from "./lock.ts";
import { type ByteRange, joined, without } from "./ranges.ts";

/**
 * This program's own store of parts of files (docs/decisions/0009-sparse-range-store.md), keyed by the hash of the
 * whole file, so that whatever is in it is right for every model and commit that has that file:
 *
 *     <hash>/data            as long as the file; the bytes that were fetched at their own places, holes elsewhere
 *     <hash>/journal         `begin end`, one line per range that is complete
 *     <hash>/etags.json      by host, what it called the content that it served: another name is another content
 *     <hash>/info.json       whose file it is, and when it was last used
 *     <hash>/use.lock        shared by those who read, exclusive for who deletes
 *     <hash>/download.lock   for who fetches
 */
export class RangeStore {
  readonly #root: string;

  constructor(root: string) {
    this.#root = root;
  }

  /** `hash` is the name of the whole file's content; nothing is created. */
  file(hash: string, size: number): StoredFile {
    return new StoredFile(join(this.#root, hash), size);
  }

  list(): StoreEntry[] {
    const hashes = namesIn(this.#root).filter((name) => HASH.test(name));
    return hashes.flatMap((hash) => {
      const folder = join(this.#root, hash);
      const info = readInfo(folder);
      return info ? [{ hash, ...info, diskBytes: diskBytes(folder), isInUse: !isFree(folder) }] : [];
    });
  }

  /** Deletes what is of this hash, and gives false, having done nothing, where a process uses it. */
  remove(hash: string): boolean {
    const folder = join(this.#root, hash);
    using held = tryLock(join(folder, USE_LOCK), "exclusive");
    if (!held) return false;
    const doomed = `${folder}.${randomBytes(4).toString("hex")}${DOOMED}`;
    try {
      renameSync(folder, doomed); // gone at once for all others
    } catch {
      return false; // another process was faster, or the disk cannot be written
    }
    this.sweep();
    return true;
  }

  /** Deletes what is doomed, also what a process that was killed had left of it. */
  sweep(): void {
    for (const name of namesIn(this.#root).filter((name) => name.endsWith(DOOMED))) {
      rmSync(join(this.#root, name), { recursive: true, force: true });
    }
  }
}

export interface FileInfo {
  readonly size: number;
  readonly modelId: string;
  readonly file: string;
  readonly commit: string;
  /** ISO 8601. */
  readonly usedAt: string;
}

export interface StoreEntry extends FileInfo {
  readonly hash: string;
  /** What the disk really gives up for it. */
  readonly diskBytes: number;
  readonly isInUse: boolean;
}

const USE_LOCK = "use.lock";
const HASH = /^[0-9a-f]{40}([0-9a-f]{24})?$/;

const DOOMED = ".pruned";

const namesIn = (root: string): string[] => {
  try {
    return readdirSync(root);
  } catch {
    return []; // nothing was ever fetched
  }
};

const isFree = (folder: string): boolean => {
  using held = tryLock(join(folder, USE_LOCK), "exclusive");
  return held !== undefined;
};

function diskBytes(folder: string): number {
  const status = statusOf(join(folder, "data"));
  return status ? status.blocks * 512 : 0; // POSIX counts in these, whatever the disk's own blocks are
}

function readInfo(folder: string): FileInfo | undefined {
  try {
    const info = JSON.parse(readText(join(folder, "info.json")) ?? "");
    return typeof info.modelId === "string" && typeof info.file === "string" ? info : undefined;
  } catch {
    return undefined;
  }
}

/** The parts of one file. Whoever reads them holds `use()` meanwhile. */
export class StoredFile {
  readonly path: string;
  readonly size: number;
  readonly #folder: string;

  constructor(folder: string, size: number) {
    this.#folder = folder;
    this.path = join(folder, "data");
    this.size = size;
  }

  /** What of these bytes is not here. The others can be read from `path`, each at its own place. */
  missing(wanted: readonly ByteRange[]): ByteRange[] {
    return without(joined(wanted), this.#complete());
  }

  /** Keeps it from being deleted. Undefined where it is just being deleted. */
  use(): Disposable | undefined {
    return tryLock(join(this.#folder, USE_LOCK), "shared");
  }

  /** One process fetches at a time: whoever waited finds what the other has fetched. */
  lockDownload(onWait: (pid: number | undefined) => void): Promise<Disposable> {
    return lock(join(this.#folder, "download.lock"), onWait);
  }

  get etags(): ReadonlyMap<string, string> {
    try {
      return new Map(Object.entries(JSON.parse(readText(join(this.#folder, "etags.json")) ?? "{}")));
    } catch {
      return new Map();
    }
  }

  set etags(etags: ReadonlyMap<string, string>) {
    writeIfPossible(join(this.#folder, "etags.json"), JSON.stringify(Object.fromEntries(etags)));
  }

  set info(info: FileInfo) {
    writeIfPossible(join(this.#folder, "info.json"), JSON.stringify(info, null, 1));
  }

  /** For the holder of the download lock. */
  async openToWrite(): Promise<RangeWriter> {
    mkdirSync(this.#folder, { recursive: true });
    // Tidied, and without the half line that a killed process may have left; of no worth if the data is gone.
    const journal = this.#complete().map(journalLine).join("");
    if (journal !== readText(this.#journalPath)) writeFileWhole(this.#journalPath, journal);
    const data = await open(this.path, constants.O_RDWR | constants.O_CREAT);
    try {
      await data.truncate(this.size);
      return new RangeWriter(data, openSync(this.#journalPath, "a"));
    } catch (error) {
      await data.close();
      throw error;
    }
  }

  /** Nothing here can be trusted any more. */
  forget(): void {
    rmSync(this.#journalPath, { force: true });
    rmSync(join(this.#folder, "etags.json"), { force: true });
  }

  #complete(): ByteRange[] {
    if (statusOf(this.path)?.size !== this.size) return [];
    const lines = (readText(this.#journalPath) ?? "").split("\n").slice(0, -1); // the last may be cut short
    return joined(lines.flatMap((line) => parseLine(line, this.size)));
  }

  get #journalPath(): string {
    return join(this.#folder, "journal");
  }
}

/** Writes bytes to their places, and says in the journal what is complete. */
export class RangeWriter implements AsyncDisposable {
  readonly #data: FileHandle;
  readonly #journal: number;

  constructor(data: FileHandle, journal: number) {
    this.#data = data;
    this.#journal = journal;
  }

  async write(bytes: Uint8Array, position: number): Promise<void> {
    for (let written = 0; written < bytes.length;) {
      const { bytesWritten } = await this.#data.write(bytes, written, bytes.length - written, position + written);
      written += bytesWritten; // a write may take only a part
    }
  }

  /** To be called once these bytes were written. They are on the disk before the journal says so. */
  async complete(range: ByteRange): Promise<void> {
    await this.#data.datasync();
    writeSync(this.#journal, journalLine(range));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    closeSync(this.#journal);
    await this.#data.close();
  }
}

const journalLine = ({ begin, end }: ByteRange): string => `${begin} ${end}\n`;

/**
 * A line that is none, e.g. one that was cut short and continued by the next, counts for nothing. Digits of one in
 * front of another make its begin larger, never smaller: what is believed is always true.
 */
function parseLine(line: string, size: number): ByteRange[] {
  const [, begin, end] = (/^(\d+) (\d+)$/.exec(line) ?? []).map(Number);
  return begin !== undefined && end !== undefined && end <= size ? [{ begin, end }] : [];
}

function writeFileWhole(path: string, text: string): void {
  const partial = `${path}.${randomBytes(4).toString("hex")}.incomplete`;
  try {
    writeFileSync(partial, text, { flag: "wx" });
    renameSync(partial, path);
  } catch (error) {
    rmSync(partial, { force: true });
    throw error;
  }
}
