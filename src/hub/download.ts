import { type FileHandle, open, rm } from "node:fs/promises";
import { formatBytes } from "../base/bytes.ts";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { codeOf, type ModelCache } from "./cache.ts";
import type { HubClient, ListedFile } from "./client.ts";

export interface Download {
  readonly client: HubClient;
  readonly cache: ModelCache;
  readonly modelId: string;
  readonly commit: string;
  readonly file: ListedFile;
  readonly log: Logger;
}

/**
 * Fetches one whole file into the cache. A connection that breaks is taken up where it broke; the content is checked
 * against the hash in the listing before it gets its name. Throws UserError `download`.
 */
export async function downloadToCache(download: Download): Promise<void> {
  const { cache, file, commit, log } = download;
  if (!cache.hasBlob(file)) {
    const started = performance.now();
    log.info("downloading", { file: file.name, size: formatBytes(file.size) });
    await fetchBlob(download);
    log.info("downloaded", { file: file.name, seconds: ((performance.now() - started) / 1000).toFixed(1) });
  }
  cache.link(file, commit);
}

async function fetchBlob(download: Download): Promise<void> {
  const { cache, file } = download;
  let partial: string | undefined;
  try {
    partial = cache.partialPath(file);
    await fill(partial, download);
    cache.adoptBlob(partial, file);
  } catch (error) {
    if (partial) await rm(partial, { force: true });
    throw diskProblem(error, file) ?? error;
  }
}

async function fill(path: string, download: Download): Promise<void> {
  const { client, modelId, commit, file } = download;
  const target = await open(path, "wx");
  try {
    const hash = hasher(file);
    // Of an empty file no range can be asked for.
    if (file.size > 0) await copyResuming(await client.open(modelId, commit, file.name), target, hash, download);
    if (hash.digest("hex") !== (file.sha256 ?? file.gitSha1)) {
      const hint = "try again; if it stays, a proxy or mirror on the way changes files";
      throw new UserError("download", `${file.name} of ${modelId} arrived with other content than the Hub lists`, hint);
    }
  } finally {
    await target.close();
  }
}

/** How often a connection may break without one new byte. */
const FRUITLESS = 5;
const REPORT_MS = 5_000;

async function copyResuming(
  contentFrom: (from: number) => ReadableStream<Uint8Array>,
  target: FileHandle,
  hash: Bun.CryptoHasher,
  { client, modelId, file, log }: Download,
): Promise<void> {
  let done = 0;
  let reported = performance.now();
  for (let fruitless = 0; done < file.size;) {
    const before = done;
    try {
      for await (const chunk of chunksOf(contentFrom(done), client.silenceMs)) {
        if (done + chunk.length > file.size) throw new Error(`more than its ${file.size} bytes came`);
        await writeAll(target, chunk);
        hash.update(chunk);
        done += chunk.length;
        if (performance.now() - reported < REPORT_MS) continue;
        reported = performance.now();
        log.info("downloading", { file: file.name, done: formatBytes(done), size: formatBytes(file.size) });
      }
      if (done < file.size) throw new Error(`the connection ended after ${done} of ${file.size} bytes`);
    } catch (error) {
      if (diskProblem(error, file)) throw error;
      fruitless = done > before ? 1 : fruitless + 1;
      log.warn("download interrupted", { file: file.name, done: formatBytes(done), error: messageOf(error) });
      if (fruitless === FRUITLESS) {
        const hint = "check the network and run it again; what has arrived whole is kept";
        throw new UserError("download", `${file.name} of ${modelId} broke off: ${messageOf(error)}`, hint, {
          cause: error,
        });
      }
      await client.pause(fruitless);
    }
  }
}

/** A file's write may take only a part of a chunk. */
async function writeAll(target: FileHandle, chunk: Uint8Array): Promise<void> {
  for (let written = 0; written < chunk.length;) {
    written += (await target.write(chunk, written, chunk.length - written)).bytesWritten;
  }
}

/** The pieces of a stream; one that falls silent is an error. */
async function* chunksOf(stream: ReadableStream<Uint8Array>, silenceMs: number): AsyncGenerator<Uint8Array> {
  const reader = stream.getReader();
  let timer: Timer | undefined;
  const silence = () =>
    new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new Error(`nothing came for ${silenceMs / 1000} s`)), silenceMs);
    });
  try {
    for (;;) {
      const { done, value } = await Promise.race([reader.read(), silence()]).finally(() => clearTimeout(timer));
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {}); // whatever it says: nothing more is wanted of it
  }
}

/** The Hub names a large file by its sha256, any other by git's sha1 of a blob. */
function hasher({ size, sha256 }: ListedFile): Bun.CryptoHasher {
  return sha256 ? new Bun.CryptoHasher("sha256") : new Bun.CryptoHasher("sha1").update(`blob ${size}\0`);
}

function diskProblem(error: unknown, file: ListedFile): UserError | undefined {
  switch (codeOf(error)) {
    case "ENOSPC":
    case "EDQUOT":
      return new UserError(
        "download",
        `the disk of the cache is full: ${file.name} has ${formatBytes(file.size)}`,
        "make room, or name another place with --cache-dir",
        { cause: error },
      );
    case "EACCES":
    case "EPERM":
    case "EROFS":
      return new UserError(
        "download",
        `${file.name} cannot be written into the cache: ${messageOf(error)}`,
        "name a place that may be written with --cache-dir",
        { cause: error },
      );
    default:
      return undefined;
  }
}
