import { existsSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../base/errors.ts";
import { unsafePathReason } from "../base/safe-path.ts";
import { readHeader, type TensorEntry } from "./header.ts";
import { JsonObject, parseJson, showJson } from "./strict-json.ts";

export interface CheckpointFile {
  readonly path: string;
  /** Relative to the checkpoint's directory. */
  readonly name: string;
  readonly size: number;
}

export interface CheckpointTensor extends TensorEntry {
  readonly file: CheckpointFile;
}

/** The files that were opened, and every tensor in them. */
export interface Checkpoint {
  readonly files: readonly CheckpointFile[];
  readonly tensors: ReadonlyMap<string, CheckpointTensor>;
}

export interface Wanted {
  /** Whether a tensor is needed, by name. A shard without one is neither opened nor expected to be there. */
  needs?: (tensorName: string) => boolean;
}

export const SINGLE_FILE = "model.safetensors";
export const INDEX_FILE = "model.safetensors.index.json";

/**
 * Reads the headers of a checkpoint: `model.safetensors`, or the shards its index names. Each tensor must be in exactly
 * the shard the index says. Throws UserError `bad_model` naming the file.
 */
export function openCheckpoint(directory: string, wanted: Wanted = {}): Checkpoint {
  const files: CheckpointFile[] = [];
  const tensors = new Map<string, CheckpointTensor>();
  for (const [name, expected] of filesOf(directory, wanted)) {
    const file = openFile(directory, name);
    const header = readHeader(file.path);
    if (expected) checkAgainstIndex(name, header, expected);
    files.push(file);
    for (const [tensor, entry] of header) tensors.set(tensor, { ...entry, file });
  }
  return { files, tensors };
}

/** The names of the files that hold a needed tensor, told without any of them being there: what is to be fetched. */
export const neededFiles = (directory: string, wanted: Wanted = {}): string[] => [...filesOf(directory, wanted).keys()];

/** File name → the tensors its index puts there; a checkpoint of one file has no index, and expects nothing. */
function filesOf(directory: string, { needs = () => true }: Wanted): Map<string, Set<string> | undefined> {
  const index = join(directory, INDEX_FILE);
  if (existsSync(join(directory, SINGLE_FILE)) || !existsSync(index)) return new Map([[SINGLE_FILE, undefined]]);
  const shards = readIndex(index);
  return new Map([...shards].filter(([, tensors]) => [...tensors].some(needs)).sort(([a], [b]) => (a < b ? -1 : 1)));
}

function readIndex(path: string): Map<string, Set<string>> {
  const shards = new Map<string, Set<string>>();
  const seen = new Set<string>();
  for (const [tensor, shard] of weightMap(path)) {
    if (typeof shard !== "string") throw brokenIndex(`weight_map gives ${showJson(shard)} as the file of "${tensor}"`);
    if (seen.has(tensor)) throw brokenIndex(`weight_map has "${tensor}" twice`);
    seen.add(tensor);
    const tensors = shards.get(shard);
    if (tensors) tensors.add(tensor);
    else shards.set(shard, new Set([tensor]));
  }
  for (const shard of shards.keys()) {
    const reason = unsafePathReason(shard);
    if (reason) throw brokenIndex(`weight_map names the file ${JSON.stringify(shard)}, which has ${reason}`);
  }
  return shards;
}

function weightMap(path: string): JsonObject["members"] {
  let index: ReturnType<typeof parseJson>;
  try {
    index = parseJson(readFileSync(path, "utf8"));
  } catch (cause) {
    if (!(cause instanceof SyntaxError)) throw cause;
    throw brokenIndex(`is not valid JSON: ${cause.message}`, cause);
  }
  const maps = index instanceof JsonObject ? index.members.filter(([key]) => key === "weight_map") : [];
  const map = maps[0]?.[1];
  if (maps.length === 1 && map instanceof JsonObject) return map.members;
  throw brokenIndex(`must have one weight_map that is an object, and has ${showJson(map)}`);
}

function openFile(directory: string, name: string): CheckpointFile {
  const path = join(directory, name);
  const status = statSync(path, { throwIfNoEntry: false });
  if (status?.isFile()) return { path, name, size: status.size };
  if (name !== SINGLE_FILE) {
    const problem = status ? `${name} is not a file` : `${name}, named by ${INDEX_FILE}, is missing`;
    throw new UserError("bad_model", `${problem} in ${directory}`, "fetch the missing file into the same directory");
  }
  throw new UserError(
    "bad_model",
    `${directory} has neither ${SINGLE_FILE} nor ${INDEX_FILE}`,
    existsSync(join(directory, "pytorch_model.bin"))
      ? "its weights are in pytorch_model.bin: convert them to SafeTensors (transformers: save_pretrained)"
      : "give the directory that holds config.json and the SafeTensors files",
  );
}

function checkAgainstIndex(file: string, header: ReadonlyMap<string, unknown>, expected: ReadonlySet<string>): void {
  const missing = [...expected].find((tensor) => !header.has(tensor));
  if (missing !== undefined) throw brokenIndex(`puts tensor "${missing}" into ${file}, which does not have it`);
  const surplus = [...header.keys()].find((tensor) => !expected.has(tensor));
  if (surplus !== undefined) throw brokenIndex(`does not put tensor "${surplus}" into ${file}, which has it`);
}

function brokenIndex(problem: string, cause?: unknown): UserError {
  const hint = "the index and the weights are of different versions or damaged: fetch both again";
  return new UserError("bad_model", `${INDEX_FILE} ${problem}`, hint, { cause });
}
