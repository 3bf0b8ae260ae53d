import { randomBytes } from "node:crypto";
import {
  copyFileSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  realpathSync,
  renameSync,
  rmSync,
  type Stats,
  statSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { basename, dirname, join, relative } from "node:path";
import { hashOf, type ListedFile } from "./client.ts";

/**
 * One model's folder in the cache that all Hugging Face tools share (huggingface_hub 1.33):
 *
 *     models--org--name/refs/<revision>             the commit
 *     models--org--name/blobs/<sha>                 content
 *     models--org--name/snapshots/<commit>/<name>   a link to it
 *     models--org--name/trees/<commit>.json         the listing of that commit
 *
 * Everything appears whole, by renaming: a reader beside us never sees half a file.
 */
export class ModelCache {
  readonly #folder: string;
  readonly #symlinks: boolean;

  constructor(cacheDir: string, modelId: string, { symlinks = true } = {}) {
    this.#symlinks = symlinks;
    this.#folder = join(cacheDir, ["models", ...modelId.split("/")].join("--"));
  }

  snapshotDirectory(commit: string): string {
    return join(this.#folder, "snapshots", commit);
  }

  readRef(revision: string): string | undefined {
    const commit = readText(join(this.#folder, "refs", revision))?.trim();
    return commit && /^[0-9a-f]{40}$/.test(commit) ? commit : undefined;
  }

  writeRef(revision: string, commit: string): void {
    if (this.readRef(revision) !== commit) writeIfPossible(join(this.#folder, "refs", revision), commit);
  }

  readListing(commit: string): ListedFile[] | undefined {
    const text = readText(this.#treePath(commit));
    return text === undefined ? undefined : parseTree(text);
  }

  writeListing(commit: string, files: readonly ListedFile[]): void {
    writeIfPossible(this.#treePath(commit), formatTree(files));
  }

  /** What is there of a commit whose listing is not: a link's target is called by the hash of its content. */
  filesPresent(commit: string): ListedFile[] {
    const directory = this.snapshotDirectory(commit);
    if (!existsSync(directory)) return [];
    const names = readdirSync(directory, { recursive: true, encoding: "utf8" }).sort();
    return names.flatMap((name) => {
      const path = join(directory, name);
      const status = statusOf(path);
      if (!status?.isFile()) return [];
      const hash = basename(realpathSync(path));
      const isSha256 = /^[0-9a-f]{64}$/.test(hash) && dirname(realpathSync(path)) === realpathSync(this.#blobs);
      return [{ name, size: status.size, gitSha1: "", sha256: isSha256 ? hash : undefined }];
    });
  }

  has({ name, size }: ListedFile, commit: string): boolean {
    return statusOf(join(this.snapshotDirectory(commit), name))?.size === size;
  }

  /** Whether the content is there, perhaps from another commit. */
  hasBlob(file: ListedFile): boolean {
    return statusOf(this.#blobPath(file))?.size === file.size;
  }

  /** Where blobs are, made if it was not there. */
  blobFolder(): string {
    mkdirSync(this.#blobs, { recursive: true });
    return this.#blobs;
  }

  /** A path in `blobs/` for this process alone. */
  partialPath(file: ListedFile): string {
    this.blobFolder();
    return `${this.#blobPath(file)}.${randomBytes(4).toString("hex")}.incomplete`;
  }

  /** Makes a whole, checked file the content. Another process may have done so meanwhile: the content is the same. */
  adoptBlob(partialPath: string, file: ListedFile): void {
    renameSync(partialPath, this.#blobPath(file));
  }

  link(file: ListedFile, commit: string): void {
    const path = join(this.snapshotDirectory(commit), file.name);
    const blob = this.#blobPath(file);
    mkdirSync(dirname(path), { recursive: true });
    rmSync(path, { force: true }); // a link that led nowhere, or to a file cut short
    try {
      if (!this.#symlinks) copyWhole(blob, path);
      else symlinkSync(relative(dirname(path), blob), path);
    } catch (error) {
      if (codeOf(error) === "EEXIST") return; // another process was faster
      copyWhole(blob, path); // a file system without links
    }
  }

  get #blobs(): string {
    return join(this.#folder, "blobs");
  }

  #blobPath(file: ListedFile): string {
    return join(this.#blobs, hashOf(file));
  }

  #treePath(commit: string): string {
    return join(this.#folder, "trees", `${commit}.json`);
  }
}

/** `trees/<commit>.json` as huggingface_hub writes it (`_tree_cache.py`). */
const TREE_FORMAT = 1;

function formatTree(files: readonly ListedFile[]): string {
  const sorted = [...files].sort((a, b) => (a.name < b.name ? -1 : 1));
  const entries = sorted.map(({ name, size, gitSha1, sha256, xetHash }) => [
    name,
    {
      size,
      blob_id: gitSha1,
      ...(sha256 && { lfs_sha256: sha256, lfs_size: size }),
      ...(xetHash && { xet_hash: xetHash }),
    },
  ]);
  return JSON.stringify({ format_version: TREE_FORMAT, files: Object.fromEntries(entries) }, null, 1);
}

interface TreeEntry {
  size: number;
  blob_id: string;
  lfs_sha256?: string;
  lfs_size?: number;
  xet_hash?: string;
}

/** A listing of another format or a damaged one is none: it is asked for again. */
function parseTree(text: string): ListedFile[] | undefined {
  try {
    const { format_version: format, files } = JSON.parse(text);
    if (format !== TREE_FORMAT) return undefined;
    return Object.entries<TreeEntry>(files).map(([name, entry]) => ({
      name,
      size: entry.lfs_size ?? entry.size,
      gitSha1: entry.blob_id,
      sha256: entry.lfs_sha256,
      xetHash: entry.xet_hash,
    }));
  } catch {
    return undefined;
  }
}

/** Refs and listings save a request next time, no more: a cache that may only be read is fine. */
export function writeIfPossible(path: string, text: string): void {
  const partial = `${path}.${randomBytes(4).toString("hex")}.incomplete`;
  try {
    mkdirSync(dirname(path), { recursive: true });
    writeFileSync(partial, text);
    renameSync(partial, path);
  } catch {
    // as said
  }
}

/** By renaming, as everything here: a copy that was cut short would have its name, but not its content. */
export function copyWhole(from: string, to: string): void {
  const partial = `${to}.${randomBytes(4).toString("hex")}.incomplete`;
  try {
    copyFileSync(from, partial);
    renameSync(partial, to);
  } catch (error) {
    rmSync(partial, { force: true });
    throw error;
  }
}

/** Undefined where nothing is, for whatever reason. */
export function statusOf(path: string): Stats | undefined {
  try {
    return statSync(path);
  } catch {
    return undefined;
  }
}

export function readText(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return undefined;
  }
}

export const codeOf = (error: unknown): unknown =>
  typeof error === "object" && error !== null && "code" in error ? error.code : undefined;
