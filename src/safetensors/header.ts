import { closeSync, fstatSync, openSync, readSync } from "node:fs";
import { basename } from "node:path";
import { messageOf, UserError } from "../base/errors.ts";
import { DTYPE_BITS, type Dtype, isDtype } from "./dtype.ts";
import { type Json, JsonReader, showJson } from "./strict-json.ts";

/** One tensor of a file: its bytes are `[begin, end)`, counted from the start of the file, at any alignment. */
export interface TensorEntry {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

/** The format's own limit; a header this long is accepted, a longer one is not. */
export const MAX_HEADER_BYTES = 100_000_000;
/** Twice as many as the largest model known has, so that what a file can make us hold has a bound. */
export const MAX_TENSORS = 1_000_000;
const LENGTH_BYTES = 8;
/** In one field of a tensor's entry, e.g. dimensions: far more than any has, and few enough to hold. */
const MOST_VALUES = 1000;

/** Reads and checks the header of a SafeTensors file. Throws UserError `bad_model`. */
export function readHeader(path: string): Map<string, TensorEntry> {
  const file = openFile(path);
  try {
    const fileSize = fstatSync(file).size;
    const first = readPrefix(file, Math.min(LENGTH_BYTES, fileSize), path);
    const size = headerSize(first, fileSize, basename(path));
    return parseHeader(readPrefix(file, size, path), fileSize, basename(path));
  } finally {
    closeSync(file);
  }
}

/** Where the header of a file ends, of which no more than the first bytes need be there. Throws UserError `bad_model`. */
export function headerEnd(path: string, fileSize: number): number {
  const file = openFile(path);
  try {
    return headerSize(readPrefix(file, Math.min(LENGTH_BYTES, fileSize), path), fileSize, basename(path));
  } finally {
    closeSync(file);
  }
}

function openFile(path: string): number {
  try {
    return openSync(path, "r");
  } catch (cause) {
    throw unreadable(path, "cannot be opened", cause);
  }
}

function readPrefix(file: number, length: number, path: string): Uint8Array {
  const bytes = new Uint8Array(length);
  let filled = 0;
  while (filled < length) {
    const count = readSome(file, bytes.subarray(filled), filled, path);
    if (count === 0) return bytes.subarray(0, filled);
    filled += count;
  }
  return bytes;
}

function readSome(file: number, target: Uint8Array, offset: number, path: string): number {
  try {
    return readSync(file, target, 0, target.length, offset);
  } catch (cause) {
    throw unreadable(path, `cannot be read at byte ${offset}`, cause);
  }
}

const unreadable = (path: string, problem: string, cause: unknown): UserError =>
  new UserError("bad_model", `${path} ${problem}: ${messageOf(cause)}`, "check that it is a file and may be read", {
    cause,
  });

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
 * each as long as its dtype and shape say. Stricter than the reference in two things: a name given twice is refused, and
 * so is what no model has, `MAX_TENSORS` and `MOST_VALUES`.
 *
 * `bytes`: the file up to the end of its header at least; `file`: its name for messages. Throws UserError `bad_model`.
 */
export function parseHeader(bytes: Uint8Array, fileSize: number, file: string): Map<string, TensorEntry> {
  const dataStart = headerSize(bytes, fileSize, file);
  if (bytes.length < dataStart) {
    throw broken(file, `gave ${bytes.length} bytes, and its header ends at byte ${dataStart}`);
  }
  const tensors = new Map<string, TensorEntry>();
  let metadataSeen = false;
  readMembers(bytes.subarray(LENGTH_BYTES, dataStart), file, (name, reader) => {
    if (name === "__metadata__") {
      if (metadataSeen) throw broken(file, "has __metadata__ twice");
      metadataSeen = true;
      checkMetadata(reader, file);
    } else {
      if (tensors.has(name)) throw broken(file, "the name is given twice", name);
      if (tensors.size === MAX_TENSORS) throw broken(file, `has more than ${MAX_TENSORS} tensors`);
      tensors.set(name, parseEntry(name, reader, dataStart, file));
    }
  });
  checkTiling(tensors, dataStart, fileSize, file);
  return tensors;
}

function readMembers(header: Uint8Array, file: string, member: (name: string, reader: JsonReader) => void): void {
  try {
    // A byte order mark is kept, so that the parser refuses it as the reference does.
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(header);
    const reader = new JsonReader(text);
    if (!reader.isObject()) {
      const value = reader.value(MOST_VALUES);
      reader.end();
      throw broken(file, `has a header that is not a JSON object but ${showJson(value)}`);
    }
    reader.object((name) => member(name, reader));
    reader.end();
  } catch (cause) {
    if (cause instanceof UserError) throw cause;
    const problem = cause instanceof SyntaxError ? cause.message : "it is not UTF-8";
    throw broken(file, `has a header of ${header.length} bytes that is not valid JSON: ${problem}`, undefined, cause);
  }
}

/** Text to text, or null; the reader has no use for it beyond that. */
function checkMetadata(reader: JsonReader, file: string): void {
  if (!reader.isObject()) {
    const value = reader.value(MOST_VALUES);
    if (value !== null) throw broken(file, `has a __metadata__ that is ${showJson(value)}`);
    return;
  }
  reader.object((key) => {
    const value = reader.value(MOST_VALUES);
    if (typeof value === "string") return;
    throw broken(file, `has ${showJson(value)} under ${showJson(key)} in __metadata__, where only text may stand`);
  });
}

function parseEntry(name: string, reader: JsonReader, dataStart: number, file: string): TensorEntry {
  const { dtype, shape, data_offsets: offsets } = entryFields(name, reader, file);
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
      `${dtype} of shape ${showJson(shape)} takes ${wanted} bytes, and data_offsets spans ${end - begin}`,
      name,
    );
  }
  return { name, dtype, shape, begin: dataStart + begin, end: dataStart + end };
}

const FIELDS = ["dtype", "shape", "data_offsets"] as const;
type Fields = Partial<Record<(typeof FIELDS)[number], Json>>;

/** Unknown fields pass; the reference also takes an entry written as the list of its three fields. */
function entryFields(name: string, reader: JsonReader, file: string): Fields {
  if (!reader.isObject()) {
    const value = reader.value(MOST_VALUES);
    if (Array.isArray(value) && value.length === FIELDS.length) {
      return { dtype: value[0], shape: value[1], data_offsets: value[2] };
    }
    throw broken(file, `the entry is ${showJson(value)}, not an object`, name);
  }
  const fields: Fields = {};
  const times = { dtype: 0, shape: 0, data_offsets: 0 };
  reader.object((key) => {
    const field = FIELDS.find((known) => known === key);
    if (!field) return reader.skip();
    times[field]++;
    fields[field] = reader.value(MOST_VALUES);
  });
  const wrong = FIELDS.find((field) => times[field] !== 1);
  if (wrong) throw broken(file, `has ${wrong} ${times[wrong]} times, and must have it once`, name);
  return fields;
}

const isCounts = (value: Json | undefined): value is number[] =>
  Array.isArray(value) && value.every((item) => typeof item === "number");

function byteLength(dtype: Dtype, shape: number[], name: string, file: string): number {
  let bits = 1;
  for (const factor of [...shape, DTYPE_BITS[dtype]]) {
    bits *= factor;
    if (bits > Number.MAX_SAFE_INTEGER) {
      throw broken(file, `${dtype} of shape ${showJson(shape)} has more than 2^53 - 1 bits`, name);
    }
  }
  if (bits % 8 !== 0)
    throw broken(file, `${dtype} of shape ${showJson(shape)} ends ${bits % 8} bits into a byte`, name);
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
  const subject = tensor === undefined ? file : `${file}: tensor ${showJson(tensor)}:`;
  return new UserError("bad_model", `${subject} ${problem}`, "the file is damaged or incomplete: fetch it again", {
    cause,
  });
}
