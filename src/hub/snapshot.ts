import { readdirSync } from "node:fs";
import { join, resolve } from "node:path";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { unsafePathReason } from "../base/safe-path.ts";
import { ModelCache, statusOf } from "./cache.ts";
import { HubClient, type ListedFile } from "./client.ts";
import { TRANSFER, type Transfer } from "./fetch-ranges.ts";
import { HubSnapshot, notCached } from "./hub-snapshot.ts";
import type { PartDownload } from "./parts.ts";
import type { ByteRange } from "./ranges.ts";
import { RangeStore } from "./range-store.ts";
import { type Environment, hubSettings, rangeStoreDir } from "./settings.ts";

export interface ModelFile {
  /** Relative to the snapshot's directory. */
  readonly name: string;
  readonly size: number;
  /** Of large files on the Hub, which lists it. */
  readonly sha256?: string;
}

/** Bytes of one of a model's files. */
export interface FilePart {
  readonly name: string;
  readonly ranges: readonly ByteRange[];
}

/**
 * A model at one commit. Its files are listed at once; on this machine they are after `fetch`, and parts of them after
 * `ensure`. Whoever has it disposes of it when no part is read any more: until then no other process deletes one.
 */
export interface Snapshot extends Disposable {
  readonly modelId: string;
  /** The commit, 40 hex digits; `local` for a directory. */
  readonly revision: string;
  readonly directory: string;
  /** All files of the model, also those not fetched. */
  readonly files: readonly ModelFile[];
  /** Brings these files whole into `directory`, those that are there already at no cost. */
  fetch(names: readonly string[], download?: PartDownload): Promise<void>;
  /** Brings these bytes to this machine, each to its own place in the file at `pathOf`. */
  ensure(parts: readonly FilePart[], download?: PartDownload): Promise<void>;
  /** Where a file can be read, as far as it was brought here. */
  pathOf(name: string): string;
  /** Of these bytes, how many are `wanted` and not here, and how many `ensure` would fetch with the small gaps between. */
  missingBytes(parts: readonly FilePart[]): { wanted: number; fetch: number };
}

export interface ModelSource {
  /** A directory, or the id of a model on the Hub. */
  readonly modelId: string;
  /** A branch, tag or commit; by default `main`. */
  readonly revision?: string;
  readonly offline?: boolean;
  readonly cacheDir?: string;
  readonly env: Environment;
  readonly log: Logger;
  readonly fetch?: typeof fetch;
  readonly transfer?: Partial<Transfer>;
  /** As `HubClient` takes them. */
  readonly retryPauseMs?: number;
  readonly silenceMs?: number;
}

/**
 * Finds a model and lists its files, without fetching any.
 *
 * Throws UserError `bad_model` for a path where nothing is, `download` for what the Hub or the cache does not have.
 */
export async function resolveModel(source: ModelSource): Promise<Snapshot> {
  const status = statusOf(source.modelId);
  if (status?.isDirectory()) return localSnapshot(source.modelId);
  if (status || !isModelId(source.modelId)) throw noSuchDirectory(source.modelId, status !== undefined);
  return await hubSnapshot(source);
}

/** What is read of a model besides its weights. */
const SMALL_FILES = [
  "config.json",
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
];

/** More than one way to write a conversation, each in a file named by what it is for. */
const CHAT_TEMPLATE = /^additional_chat_templates\/\w[\w.-]*\.jinja$/;

export const SINGLE_FILE = "model.safetensors";
export const INDEX_FILE = "model.safetensors.index.json";

/** Those of the small files that this model has: to be fetched before anything can be said about its weights. */
export function smallFiles({ files }: Snapshot): string[] {
  const has = (name: string) => files.some((file) => file.name === name);
  const templates = files.map(({ name }) => name).filter((name) => CHAT_TEMPLATE.test(name));
  return [...SMALL_FILES, ...(has(SINGLE_FILE) ? [] : [INDEX_FILE])].filter(has).concat(templates);
}

const isModelId = (modelId: string): boolean =>
  /^\w[\w.-]*\/\w[\w.-]*$/.test(modelId) && !/--|\.\.|\.git$/.test(modelId);

function noSuchDirectory(modelId: string, isFile: boolean): UserError {
  return new UserError(
    "bad_model",
    isFile ? `${modelId} is not a directory` : `no such directory: ${modelId}`,
    "give the directory of a model, or its id on the Hub as org/name (openai-community/gpt2)",
  );
}

function namesIn(directory: string): string[] {
  try {
    return readdirSync(directory);
  } catch (cause) {
    const problem = `the directory ${directory} cannot be read: ${messageOf(cause)}`;
    throw new UserError("bad_model", problem, "let this user read it, or run as one who may", { cause });
  }
}

function localSnapshot(modelId: string): Snapshot {
  const directory = resolve(modelId);
  const files = namesIn(directory).flatMap((name) => {
    const status = statusOf(join(directory, name));
    return status?.isFile() ? [{ name, size: status.size }] : [];
  });
  return {
    modelId,
    revision: "local",
    directory,
    files,
    async fetch() {},
    async ensure() {},
    pathOf: (name) => join(directory, name),
    missingBytes: () => ({ wanted: 0, fetch: 0 }),
    [Symbol.dispose]() {},
  };
}

async function hubSnapshot(source: ModelSource): Promise<Snapshot> {
  const { modelId, revision = "main", log } = source;
  const reason = unsafePathReason(revision);
  if (reason)
    throw new UserError("bad_usage", `the revision ${revision} has ${reason}`, "give a branch, tag or commit");

  const settings = hubSettings(source.env);
  const cache = new ModelCache(source.cacheDir ?? settings.cacheDir, modelId, settings);
  const offline = source.offline || settings.offline;
  const client = offline
    ? undefined
    : new HubClient({ ...source, ...settings, silenceMs: source.silenceMs ?? settings.silenceMs });
  const place = { cache, client, log };
  const commit = await resolveCommit(modelId, revision, place);
  const listing = await listFiles(modelId, commit, place);
  return new HubSnapshot({
    ...place,
    modelId,
    commit,
    // A name that leads out of the snapshot is not fetched and not offered.
    listing: new Map(listing.filter(({ name }) => !unsafePathReason(name)).map((file) => [file.name, file])),
    store: new RangeStore(rangeStoreDir(source.env, source.cacheDir)),
    transfer: { ...TRANSFER, ...source.transfer },
  });
}

interface Place {
  readonly cache: ModelCache;
  /** None where the node is offline. */
  readonly client: HubClient | undefined;
  readonly log: Logger;
}

/** Asked of the Hub once; where it cannot be reached, what it said last counts. */
async function resolveCommit(modelId: string, revision: string, { cache, client, log }: Place): Promise<string> {
  if (/^[0-9a-f]{40}$/.test(revision)) return revision;
  const known = cache.readRef(revision);
  if (!client) return known ?? raise(notCached(`${modelId}@${revision}`));
  try {
    const commit = await client.resolveCommit(modelId, revision);
    cache.writeRef(revision, commit);
    return commit;
  } catch (error) {
    return fallBack(known, error, log);
  }
}

/** A commit never changes, so its listing is asked for once. */
async function listFiles(modelId: string, commit: string, { cache, client, log }: Place): Promise<ListedFile[]> {
  const known = cache.readListing(commit);
  if (known) return known;
  const present = cache.filesPresent(commit); // by a tool that keeps no listings
  const partial = present.length > 0 ? present : undefined;
  if (!client) return partial ?? raise(notCached(`${modelId}@${commit}`));
  try {
    const files = await client.list(modelId, commit);
    cache.writeListing(commit, files);
    return files;
  } catch (error) {
    return fallBack(partial, error, log);
  }
}

function fallBack<T>(cached: T | undefined, error: unknown, log: Logger): T {
  if (cached === undefined || !(error instanceof UserError) || !error.details["unreachable"]) throw error;
  log.warn("using what is cached", { because: error.message });
  return cached;
}

function raise(error: Error): never {
  throw error;
}
