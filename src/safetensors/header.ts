import { closeSync, fstatSync, openSync, readSync } from "node:fs";
import { basename } from "node:path";
import { UserError } from "../base/errors.ts";
import { DTYPE_BITS, type Dtype, isDtype } from "./dtype.ts";
import { type Json, JsonObject, parseJson, showJson } from "./strict-json.ts";

/** One tensor of a file: its bytes are `[begin, end)`, counted from the start of the file, at any alignment. */
export interface TensorEntry {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

/** The format's own limit; a header this long is accepted, a longer one is not. */
const MAX_HEADER_BYTES = 100_000_000;
const LENGTH_BYTES = 8;

/** Reads and checks the header of a SafeTensors file. Throws UserError `bad_model`. */
export function readHeader(path: string): Map<string, TensorEntry> {
  const file = openSync(path, "r");
  try {
    const fileSize = fstatSync(file).size;
    const first = readPrefix(file, Math.min(LENGTH_BYTES, fileSize));
    return parseHeader(readPrefix(file, headerSize(first, fileSize, basename(path))), fileSize, basename(path));
  } finally {
    closeSync(file);
  }
}

function readPrefix(file: number, length: number): Uint8Array {
  const bytes = new Uint8Array(length);
  let filled = 0;
  while (filled < length) {
    const count = readSync(file, bytes, filled, length - filled, filled);
    if (count === 0) return bytes.subarray(0, filled);
    filled += count;
  }
  return bytes;
}

/** Where the header ends and the data begins, told from the first 8 bytes of a file. */
export function headerSize(bytes: Uint8Array, fileSize: number, file: string): number {
  if (fileSize < LENGTH_BYTES || bytes.length < LENGTH_BYTES) {
    throw broken(file, `is ${fileSize} bytes long, and a SafeTensors file begins with ${LENGTH_BYTES} bytes of length`);
  }
  const length = new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true);
  if (length > MAX_HEADER_BYTES) {
    throw broken(file, `says its header has ${length} bytes, and the format allows ${MAX_HEADER_BYTES}`);
  }
  const size = LENGTH_BYTES + Number(length);
  if (size > fileSize) throw broken(file, `says its header ends at byte ${size}, and the file has ${fileSize}`);
  return size;
}

/**
 * The tensors of a file by name, every rule of the format checked: the entries tile the data without hole or overlap,
 * each as long as its dtype and shape say. Stricter than the reference in one thing: a name given twice is refused.
 *
 * `bytes`: the file up to the end of its header at least; `file`: its name for messages. Throws UserError `bad_model`.
 */
export function parseHeader(bytes: Uint8Array, fileSize: number, file: string): Map<string, TensorEntry> {
  const dataStart = headerSize(bytes, fileSize, file);
  if (bytes.length < dataStart) {
    throw broken(file, `gave ${bytes.length} bytes, and its header ends at byte ${dataStart}`);
  }
  const root = parseRoot(bytes.subarray(LENGTH_BYTES, dataStart), file);

  const tensors = new Map<string, TensorEntry>();
  let metadataSeen = false;
  for (const [name, value] of root.members) {
    if (name === "__metadata__") {
      if (metadataSeen) throw broken(file, "has __metadata__ twice");
      metadataSeen = true;
      checkMetadata(value, file);
    } else {
      if (tensors.has(name)) throw broken(file, "the name is given twice", name);
      tensors.set(name, parseEntry(name, value, dataStart, file));
    }
  }
  checkTiling(tensors, dataStart, fileSize, file);
  return tensors;
}

function parseRoot(header: Uint8Array, file: string): JsonObject {
  let root: Json;
  try {
    // A byte order mark is kept, so that the parser refuses it as the reference does.
    root = parseJson(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(header));
  } catch (cause) {
    const problem = cause instanceof SyntaxError ? cause.message : "it is not UTF-8";
    throw broken(file, `has a header of ${header.length} bytes that is not valid JSON: ${problem}`, undefined, cause);
  }
  if (root instanceof JsonObject) return root;
  throw broken(file, `has a header that is not a JSON object but ${showJson(root)}`);
}

/** Text to text, or null; the reader has no use for it beyond that. */
function checkMetadata(metadata: Json, file: string): void {
  if (metadata === null) return;
  if (!(metadata instanceof JsonObject)) throw broken(file, `has a __metadata__ that is ${showJson(metadata)}`);
  for (const [key, value] of metadata.members) {
    if (typeof value === "string") continue;
    throw broken(file, `has ${showJson(value)} under "${key}" in __metadata__, where only text may stand`);
  }
}

function parseEntry(name: string, value: Json, dataStart: number, file: string): TensorEntry {
  const { dtype, shape, data_offsets: offsets } = entryFields(name, value, file);
  if (!isDtype(dtype)) throw broken(file, `dtype is ${showJson(dtype)}, which SafeTensors does not have`, name);
  if (!isCounts(shape)) {
    throw broken(file, `shape is ${showJson(shape)}, and must be a list of whole numbers from 0 to 2^53 - 1`, name);
  }
  if (!isCounts(offsets) || offsets.length !== 2) {
    throw broken(file, `data_offsets is ${showJson(offsets)}, and must be two whole numbers up to 2^53 - 1`, name);
  }
  const [begin, end] = offsets as [number, number];
  if (end < begin) throw broken(file, `data_offsets ends at ${end}, before its begin ${begin}`, name);
  const wanted = byteLength(dtype, shape, name, file);
  if (end - begin !== wanted) {
    throw broken(
      file,
      `${dtype} of shape [${shape}] takes ${wanted} bytes, and data_offsets spans ${end - begin}`,
      name,
    );
  }
  return { name, dtype, shape, begin: dataStart + begin, end: dataStart + end };
}

const FIELDS = ["dtype", "shape", "data_offsets"] as const;
type Fields = Partial<Record<(typeof FIELDS)[number], Json>>;

/** Unknown fields pass; the reference also takes an entry written as the list of its three fields. */
function entryFields(name: string, value: Json, file: string): Fields {
  if (Array.isArray(value) && value.length === FIELDS.length) {
    return { dtype: value[0], shape: value[1], data_offsets: value[2] };
  }
  if (!(value instanceof JsonObject)) throw broken(file, `the entry is ${showJson(value)}, not an object`, name);
  const fields: Fields = {};
  for (const field of FIELDS) {
    const found = value.members.filter(([key]) => key === field);
    if (found.length !== 1) throw broken(file, `has ${field} ${found.length} times, and must have it once`, name);
    fields[field] = found[0]?.[1];
  }
  return fields;
}

const isCounts = (value: Json | undefined): value is number[] =>
  Array.isArray(value) && value.every((item) => typeof item === "number");

function byteLength(dtype: Dtype, shape: readonly number[], name: string, file: string): number {
  let bits = 1;
  for (const factor of [...shape, DTYPE_BITS[dtype]]) {
    bits *= factor;
    if (bits > Number.MAX_SAFE_INTEGER) {
      throw broken(file, `${dtype} of shape [${shape}] has more than 2^53 - 1 bits`, name);
    }
  }
  if (bits % 8 !== 0) throw broken(file, `${dtype} of shape [${shape}] ends ${bits % 8} bits into a byte`, name);
  return bits / 8;
}

function checkTiling(tensors: Map<string, TensorEntry>, dataStart: number, fileSize: number, file: string): void {
  // By end as well, so that an empty tensor comes before the one that begins at the same byte.
  const inOrder = [...tensors.values()].sort((a, b) => a.begin - b.begin || a.end - b.end);
  let at = dataStart;
  for (const { name, begin, end } of inOrder) {
    if (begin !== at) {
      const problem = begin > at ? `${begin - at} bytes belong to no tensor` : `${at - begin} bytes belong to two`;
      throw broken(file, `begins at byte ${begin} of the file, and the data before it ends at ${at}: ${problem}`, name);
    }
    at = end;
  }
  if (at !== fileSize) throw broken(file, `has ${fileSize} bytes, and its tensors end at byte ${at}`);
}

function broken(file: string, problem: string, tensor?: string, cause?: unknown): UserError {
  const subject = tensor === undefined ? file : `${file}: tensor ${JSON.stringify(tensor)}:`;
  return new UserError("bad_model", `${subject} ${problem}`, "the file is damaged or incomplete: fetch it again", {
    cause,
  });
}
