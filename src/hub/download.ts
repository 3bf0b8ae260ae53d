import { type FileHandle, open, rm } from "node:fs/promises";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import type { ModelCache } from "./cache.ts";
import type { HubClient, ListedFile } from "./client.ts";
import type { HubContent } from "./content.ts";
import { checkDiskSpace, diskProblem } from "./disk.ts";

export interface Download {
  readonly client: HubClient;
  readonly content: HubContent;
  readonly cache: ModelCache;
  readonly file: ListedFile;
  /** The file and its model, for errors. */
  readonly what: string;
  readonly log: Logger;
  readonly onBytes?: (bytes: number) => void;
}

/**
 * Fetches one whole file into the cache's blobs. A connection that breaks is taken up where it broke, or at the start
 * where the server ignores Range; the content is checked against its hash before it gets its name. Throws UserError
 * `download`.
 */
export async function downloadBlob(download: Download): Promise<void> {
  const { cache, file, what, log } = download;
  const started = performance.now();
  let partial: string | undefined;
  try {
    await checkDiskSpace(cache.blobFolder(), file.size, what);
    partial = cache.partialPath(file);
    await fill(partial, download);
    cache.adoptBlob(partial, file);
  } catch (error) {
    if (partial) await rm(partial, { force: true });
    throw diskProblem(error, what) ?? error;
  }
  const seconds = ((performance.now() - started) / 1000).toFixed(1);
  log.debug("downloaded", { file: file.name, size: formatBytes(file.size), seconds });
}

async function fill(path: string, download: Download): Promise<void> {
  const { file, what } = download;
  const target = await open(path, "wx");
  try {
    const hash = await copyResuming(target, download);
    if (hash !== (file.sha256 ?? file.gitSha1)) throw otherContent(what);
  } finally {
    await target.close();
  }
}

/** Gives the hash of what was written. */
async function copyResuming(target: FileHandle, download: Download): Promise<string> {
  const { client, content, file, what, onBytes } = download;
  let hash = contentHasher(file);
  let done = 0;
  let asked = 0;
  let resumes = true;
  const tryOnce = async () => {
    if (!resumes) [hash, done] = [contentHasher(file), 0];
    asked = done;
    if (done === file.size && done > 0) return;
    for await (const piece of content.read(done > 0 ? { begin: done, end: file.size } : "whole")) {
      for (let written = 0; written < piece.length;) {
        const left = piece.length - written;
        written += (await target.write(piece, written, left, done + written)).bytesWritten; // it may take only a part
      }
      hash.update(piece);
      done += piece.length;
      onBytes?.(piece.length);
    }
  };
  const orFromTheStart = async () => {
    try {
      await tryOnce();
    } catch (error) {
      if (!(error instanceof UserError) || !error.details["ignoresRange"]) throw error;
      resumes = false;
      await tryOnce();
    }
  };
  await client.persist(orFromTheStart, { what, hasProgressed: () => resumes && done > asked });
  return hash.digest("hex");
}

/** The Hub names a large file by its sha256, any other by git's sha1 of a blob. */
export function contentHasher({ size, sha256 }: ListedFile): Bun.CryptoHasher {
  return sha256 ? new Bun.CryptoHasher("sha256") : new Bun.CryptoHasher("sha1").update(`blob ${size}\0`);
}

export const otherContent = (what: string): UserError =>
  new UserError(
    "download",
    `${what} arrived with other content than the Hub lists`,
    "try again; if it stays, a proxy or mirror on the way changes files",
  );
