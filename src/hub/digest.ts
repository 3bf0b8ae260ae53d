import { readFileSync, realpathSync } from "node:fs";
import { open, stat } from "node:fs/promises";
import { join } from "node:path";
import { UserError } from "../base/errors.ts";
import { readText, writeIfPossible } from "./cache.ts";
import { type Environment, meshnetCacheDir } from "./settings.ts";
import { INDEX_FILE, type ModelFile, SINGLE_FILE, type Snapshot } from "./snapshot.ts";

/**
 * The identity of a model: sha256 in hex over config.json and the name, size and sha256 of every SafeTensors file of
 * the checkpoint, those that another node holds too. A copy in a directory has the digest of the Hub's.
 *
 * The Hub lists the sha256 of its files; others are computed here, and remembered where `env` has its cache.
 */
export async function modelDigest(snapshot: Snapshot, env: Environment): Promise<string> {
  await snapshot.fetch(["config.json"]);
  const digest = new Bun.CryptoHasher("sha256").update(readRequired(snapshot, "config.json"));
  for (const file of await weightFiles(snapshot)) {
    const sha256 = file.sha256 ?? (await sha256Of(snapshot, file.name, env));
    digest.update(`\0${file.name}\0${file.size}\0${sha256}`);
  }
  return digest.digest("hex");
}

/** The one file, or those the index names, sorted by name. */
async function weightFiles(snapshot: Snapshot): Promise<ModelFile[]> {
  const byName = new Map(snapshot.files.map((file) => [file.name, file]));
  const single = byName.get(SINGLE_FILE);
  if (single) return [single];
  if (!byName.has(INDEX_FILE)) throw lacks(snapshot, `neither ${SINGLE_FILE} nor ${INDEX_FILE}`);
  await snapshot.fetch([INDEX_FILE]);
  return shardNames(readRequired(snapshot, INDEX_FILE).toString("utf8")).map((name) => {
    const file = byName.get(name);
    if (!file) throw lacks(snapshot, `no ${name}, which its ${INDEX_FILE} names`);
    return file;
  });
}

function shardNames(index: string): string[] {
  try {
    return [...new Set(Object.values<string>(JSON.parse(index).weight_map))].sort();
  } catch (cause) {
    const hint = "the file is damaged: fetch it again";
    throw new UserError("bad_model", `${INDEX_FILE} has no weight_map that can be read`, hint, { cause });
  }
}

async function sha256Of(snapshot: Snapshot, name: string, env: Environment): Promise<string> {
  await snapshot.fetch([name]);
  const path = realpathSync(join(snapshot.directory, name));
  const { size, mtimeMs, ctimeMs, ino } = await stat(path);
  const memory = join(meshnetCacheDir(env), "sha256.json");
  const remembered = readMemory(memory)[path];
  // The time of a change cannot be set back as that of a modification can.
  const isSame = remembered?.size === size && remembered.mtimeMs === mtimeMs && remembered.ctimeMs === ctimeMs;
  if (isSame && remembered.ino === ino) return remembered.sha256;
  const sha256 = await hashFile(path);
  writeIfPossible(
    memory,
    JSON.stringify({ ...readMemory(memory), [path]: { size, mtimeMs, ctimeMs, ino, sha256 } }, null, 1),
  );
  return sha256;
}

interface Remembered {
  readonly size: number;
  readonly mtimeMs: number;
  readonly ctimeMs: number;
  readonly ino: number;
  readonly sha256: string;
}

type Memory = Record<string, Remembered | undefined>;

function readMemory(path: string): Memory {
  try {
    return JSON.parse(readText(path) ?? "{}") ?? {};
  } catch {
    return {}; // damaged: computed anew
  }
}

const CHUNK_BYTES = 4 * 2 ** 20;

async function hashFile(path: string): Promise<string> {
  const hash = new Bun.CryptoHasher("sha256");
  const chunk = new Uint8Array(CHUNK_BYTES);
  const file = await open(path, "r");
  try {
    for (;;) {
      const { bytesRead } = await file.read(chunk, 0, chunk.length);
      if (bytesRead === 0) return hash.digest("hex");
      hash.update(chunk.subarray(0, bytesRead));
    }
  } finally {
    await file.close();
  }
}

function readRequired(snapshot: Snapshot, name: string): Buffer {
  try {
    return readFileSync(join(snapshot.directory, name));
  } catch (cause) {
    throw lacks(snapshot, `no ${name}`, cause);
  }
}

const lacks = (snapshot: Snapshot, what: string, cause?: unknown): UserError =>
  new UserError("bad_model", `${snapshot.modelId} has ${what}`, "give a model whose weights are SafeTensors files", {
    cause,
  });
