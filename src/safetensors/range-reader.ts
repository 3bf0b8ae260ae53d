import { closeSync, fstatSync, openSync, readSync } from "node:fs";
import { messageOf, UserError } from "../base/errors.ts";
import type { CheckpointFile } from "./checkpoint.ts";

/**
 * Reads parts of a checkpoint's files into the caller's memory, wherever they begin: `using reader = new RangeReader()`.
 * By positioned reads, since a file that is cut short while it is mapped ends the process with SIGBUS, and copying out
 * of a mapping is no faster (docs/decisions/0010-reading-without-sigbus.md). One file is open at a time: a checkpoint
 * may have more shards than a process may have files.
 */
export class RangeReader implements Disposable {
  #open: { readonly file: CheckpointFile; readonly descriptor: number } | undefined;

  /**
   * Fills `target` with the bytes of `file` from `offset` on. Throws UserError `bad_model` when the file is not there, or
   * not of the size that it had when its header was read.
   */
  read(file: CheckpointFile, offset: number, target: Uint8Array): void {
    const wanted = { file, offset, length: target.length };
    const descriptor = this.#descriptorOf(wanted);
    for (let filled = 0; filled < target.length;) {
      const count = readSome(descriptor, target.subarray(filled), offset + filled, wanted);
      if (count === 0) throw changed(wanted, fstatSync(descriptor).size);
      filled += count;
    }
  }

  [Symbol.dispose](): void {
    if (this.#open) closeSync(this.#open.descriptor);
    this.#open = undefined;
  }

  #descriptorOf(wanted: Wanted): number {
    const { file } = wanted;
    if (this.#open?.file === file) return this.#open.descriptor;
    this[Symbol.dispose]();
    const descriptor = openFile(wanted);
    this.#open = { file, descriptor };
    const { size } = fstatSync(descriptor);
    if (size !== file.size) throw changed(wanted, size);
    return descriptor;
  }
}

interface Wanted {
  readonly file: CheckpointFile;
  readonly offset: number;
  readonly length: number;
}

function openFile(wanted: Wanted): number {
  try {
    return openSync(wanted.file.path, "r");
  } catch (cause) {
    throw unreadable(wanted, `it cannot be opened any more (${messageOf(cause)})`, cause);
  }
}

/** As many bytes as the system gives at once: one read stops at 2 GiB, and at the end of the file. */
function readSome(descriptor: number, target: Uint8Array, offset: number, wanted: Wanted): number {
  try {
    return readSync(descriptor, target, 0, target.length, offset);
  } catch (cause) {
    throw unreadable(wanted, `reading at byte ${offset} failed (${messageOf(cause)})`, cause);
  }
}

const changed = (wanted: Wanted, size: number): UserError => unreadable(wanted, `now it has ${size}`);

function unreadable({ file, offset, length }: Wanted, problem: string, cause?: unknown): UserError {
  return new UserError(
    "bad_model",
    `${file.name}: bytes ${offset}-${offset + length} are wanted of the file that had ${file.size} bytes when its header was read, and ${problem}`,
    "leave a model's files alone while they are loaded: fetch the file again, and start again",
    { cause },
  );
}
