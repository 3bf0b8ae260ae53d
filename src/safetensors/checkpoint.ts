import { existsSync, readFileSync, type Stats, statSync } from "node:fs";
import { join } from "node:path";
import { messageOf, UserError } from "../base/errors.ts";
import { unsafePathReason } from "../base/safe-path.ts";
import { MAX_HEADER_BYTES, MAX_TENSORS, readHeader, type TensorEntry } from "./header.ts";
import { JsonReader, showJson } from "./strict-json.ts";

export interface CheckpointFile {
  readonly path: string;
  /** Relative to the checkpoint's directory. */
  readonly name: string;
  readonly size: number;
}

export interface CheckpointTensor extends TensorEntry {
  readonly file: CheckpointFile;
}

/** The files that were opened, and every tensor in them that is needed. */
export interface Checkpoint {
  readonly files: readonly CheckpointFile[];
  readonly tensors: ReadonlyMap<string, CheckpointTensor>;
}

export interface Wanted {
  /** Whether a tensor is needed, by name. A shard without one is neither opened nor expected to be there. */
  needs?: (tensorName: string) => boolean;
  /** Where a file's bytes are, for weights that are not in the directory itself. */
  pathOf?: (fileName: string) => string;
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
  const { needs = () => true } = wanted;
  for (const [name, expected] of filesOf(directory, wanted)) {
    const file = openFile(directory, name, wanted);
    const header = readHeader(file.path);
    if (expected) checkAgainstIndex(name, header, expected);
    files.push(file);
    for (const [tensor, entry] of header) if (needs(tensor)) tensors.set(tensor, { ...entry, file });
  }
  return { files, tensors };
}

/** The names of the files that hold a needed tensor, told without any of them being there: what is to be fetched. */
export const neededFiles = (directory: string, wanted: Wanted = {}): string[] => [...filesOf(directory, wanted).keys()];

/** File name → the tensors its index puts there; a checkpoint of one file has no index, and expects nothing. */
function filesOf(directory: string, wanted: Wanted): Map<string, Set<string> | undefined> {
  const { needs = () => true } = wanted;
  const index = join(directory, INDEX_FILE);
  const single = pathIn(directory, SINGLE_FILE, wanted);
  if (existsSync(single) || !existsSync(index)) return new Map([[SINGLE_FILE, undefined]]);
  const shards = readIndex(index);
  return new Map([...shards].filter(([, tensors]) => [...tensors].some(needs)).sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** File name → the tensors of that file. */
function readIndex(path: string): Map<string, Set<string>> {
  const shards = new Map<string, Set<string>>();
  const seen = new Set<string>();
  readWeightMap(path, (tensor, shard) => {
    if (seen.has(tensor)) throw brokenIndex(`weight_map has ${showJson(tensor)} twice`);
    if (seen.size === MAX_TENSORS) throw brokenIndex(`has more than ${MAX_TENSORS} tensors`);
    seen.add(tensor);
    const tensors = shards.get(shard);
    if (tensors) tensors.add(tensor);
    else shards.set(shard, new Set([tensor]));
  });
  for (const shard of shards.keys()) {
    const reason = unsafePathReason(shard);
    if (reason) throw brokenIndex(`weight_map names the file ${showJson(shard)}, which has ${reason}`);
  }
  return shards;
}

/** A wrong value is shown in the message up to this size. */
const SHOWN_VALUES = 1000;

/** Name by name, since the map of a large model is tens of megabytes of text. */
function readWeightMap(path: string, add: (tensor: string, shard: string) => void): void {
  const reader = new JsonReader(indexText(path));
  let maps = 0;
  const readMap = () => {
    if (++maps > 1) throw noWeightMap("two");
    if (!reader.isObject()) throw noWeightMap(showJson(reader.value(SHOWN_VALUES)));
    reader.object((tensor) => {
      const shard = reader.value(1);
      if (typeof shard !== "string")
        throw brokenIndex(`weight_map gives ${showJson(shard)} as the file of ${showJson(tensor)}`);
      add(tensor, shard);
    });
  };
  try {
    if (!reader.isObject()) throw noWeightMap(showJson(reader.value(SHOWN_VALUES)));
    reader.object((key) => (key === "weight_map" ? readMap() : reader.skip()));
    reader.end();
  } catch (cause) {
    if (!(cause instanceof SyntaxError)) throw cause;
    throw brokenIndex(`is not valid JSON: ${cause.message}`, cause);
  }
  if (maps === 0) throw noWeightMap("none");
}

function indexText(path: string): string {
  let bytes: Uint8Array;
  try {
    const { size } = statSync(path);
    if (size > MAX_HEADER_BYTES) throw brokenIndex(`has ${size} bytes, and meshnet reads up to ${MAX_HEADER_BYTES}`);
    bytes = readFileSync(path);
  } catch (cause) {
    if (cause instanceof UserError) throw cause;
    throw brokenIndex(`cannot be read: ${messageOf(cause)}`, cause);
  }
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (cause) {
    throw brokenIndex("is not valid UTF-8", cause);
  }
}

const pathIn = (directory: string, name: string, { pathOf }: Wanted): string => pathOf?.(name) ?? join(directory, name);

function openFile(directory: string, name: string, wanted: Wanted): CheckpointFile {
  const path = pathIn(directory, name, wanted);
  const status = statusOf(path);
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

/** Undefined where there is nothing, also where a part of the path is a file. */
function statusOf(path: string): Stats | undefined {
  try {
    return statSync(path);
  } catch {
    return undefined;
  }
}

function checkAgainstIndex(file: string, header: ReadonlyMap<string, unknown>, expected: ReadonlySet<string>): void {
  const missing = [...expected].find((tensor) => !header.has(tensor));
  if (missing !== undefined) throw brokenIndex(`puts tensor ${showJson(missing)} into ${file}, which does not have it`);
  const surplus = [...header.keys()].find((tensor) => !expected.has(tensor));
  if (surplus !== undefined) throw brokenIndex(`does not put tensor ${showJson(surplus)} into ${file}, which has it`);
}

function brokenIndex(problem: string, cause?: unknown): UserError {
  const hint = "the index and the weights are of different versions or damaged: fetch both again";
  return new UserError("bad_model", `${INDEX_FILE} ${problem}`, hint, { cause });
}

const noWeightMap = (found: string): UserError =>
  brokenIndex(`must have one weight_map that is an object, and has ${found}`);
