import { type Pointer, toArrayBuffer } from "bun:ffi";
import { closeSync, fstatSync, openSync, readSync } from "node:fs";
import { basename } from "node:path";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { hasLibc, libc, MAP_SHARED, mapFailed, PROT_READ } from "../base/libc.ts";

/** Bytes of a file for as long as they are needed: `using range = mapRange(…)`. */
export interface MappedRange extends Disposable {
  /** At any alignment. Reading a view of them after disposal, or writing to them, ends the process. */
  readonly bytes: Uint8Array;
}

/** What one ArrayBuffer of Bun holds; a larger tensor is mapped in pieces. */
export const MAX_RANGE_BYTES = 2 ** 32;

/**
 * `length` bytes of a file from `offset` on, read-only and without a copy, so that neither a read-only cache nor a
 * file larger than memory is a problem (Bun.mmap wants to write, and unmaps only by garbage collection). Where the
 * system cannot map, they are read. A file that is truncated while mapped ends the process with SIGBUS.
 *
 * Throws UserError `bad_model` when the file is missing or shorter than `offset + length`.
 */
export function mapRange(path: string, offset: number, length: number): MappedRange {
  const file = openFile(path);
  try {
    const size = fstatSync(file).size;
    if (offset + length > size) throw tooShort(path, offset, length, size);
    return (hasLibc && length > 0 ? map(file, offset, length) : undefined) ?? read(file, offset, length);
  } finally {
    closeSync(file); // a mapping outlives its descriptor
  }
}

/** Offsets must divide by the page size, and this is a multiple of every one in use (4, 16 and 64 KiB). */
const PAGE_MULTIPLE = 65536;

function map(file: number, offset: number, length: number): MappedRange | undefined {
  const lead = offset % PAGE_MULTIPLE;
  if (lead + length > MAX_RANGE_BYTES)
    throw new RangeError(`${length} bytes from ${offset} on are over 4 GiB in one map`);
  const c = openLibc();
  if (!c) return undefined;
  const address = c.mmap(null, lead + length, PROT_READ, MAP_SHARED, file, offset - lead) as Pointer | null;
  if (address === null || mapFailed(address)) return undefined; // some network file systems cannot map
  return new Mapping(address, lead, length);
}

class Mapping implements MappedRange {
  #bytes: Uint8Array | undefined;
  readonly #address: Pointer;
  readonly #mappedLength: number;

  constructor(address: Pointer, lead: number, length: number) {
    this.#address = address;
    this.#mappedLength = lead + length;
    this.#bytes = new Uint8Array(toArrayBuffer(address, 0, this.#mappedLength), lead, length);
  }

  get bytes(): Uint8Array {
    if (!this.#bytes) throw new Error("the bytes of a mapped range were asked for after its disposal");
    return this.#bytes;
  }

  [Symbol.dispose](): void {
    if (!this.#bytes) return;
    this.#bytes = undefined;
    libc().munmap(this.#address, this.#mappedLength);
  }
}

/** Positioned reads: half as fast as a mapping, and the same to the caller. */
export function read(file: number, offset: number, length: number): MappedRange {
  const bytes = new Uint8Array(length);
  let filled = 0;
  while (filled < length) {
    const count = readSync(file, bytes, filled, length - filled, offset + filled);
    if (count === 0) throw new Error(`a file ended ${length - filled} bytes early while it was read`);
    filled += count;
  }
  return { bytes, [Symbol.dispose]() {} };
}

/** musl's Linux has no libc.so.6 to open. */
function openLibc(): ReturnType<typeof libc> | undefined {
  try {
    return libc();
  } catch {
    return undefined;
  }
}

function openFile(path: string): number {
  try {
    return openSync(path, "r");
  } catch (cause) {
    throw new UserError("bad_model", `${path} cannot be opened`, "check that it exists and may be read", { cause });
  }
}

function tooShort(path: string, offset: number, length: number, size: number): UserError {
  return new UserError(
    "bad_model",
    `${basename(path)}: bytes ${offset}-${offset + length} are wanted, and the file has ${size} (${formatBytes(size)})`,
    "the file changed or is incomplete: fetch it again",
  );
}
