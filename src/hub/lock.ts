import { dlopen } from "bun:ffi";
import { randomBytes } from "node:crypto";
import { closeSync, fstatSync, mkdirSync, openSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { statusOf } from "./cache.ts";

export type LockKind = "shared" | "exclusive";

/**
 * Takes the lock of a file at once, or gives undefined where another process (or another part of this one) has it.
 * It is the kernel's own (flock), so it ends with its process, however that ends: no lock is ever stale. Where the
 * system or the folder has none (Windows, a read-only disk) a lock that holds nothing is given: they spare work, and
 * what they guard is right without them.
 */
export function tryLock(path: string, kind: LockKind): Disposable | undefined {
  const flock = openFlock();
  for (;;) {
    const file = flock && openForLock(path);
    if (!flock || file === undefined) return NONE;
    if (flock(file, (kind === "shared" ? LOCK_SH : LOCK_EX) | LOCK_NB) !== 0) {
      closeSync(file);
      return hasLocks(dirname(path), flock) ? undefined : NONE;
    }
    if (isStillThere(path, file)) {
      if (kind === "exclusive") writeFileSync(path, `${process.pid}\n`); // for those who wait, to say for whom
      return { [Symbol.dispose]: () => closeSync(file) };
    }
    closeSync(file); // it was deleted between opening and locking: others lock its successor
  }
}

/** Waits for the lock. `onWait` is called once, with the process that has it, if that can be told. */
export async function lock(path: string, onWait: (pid: number | undefined) => void): Promise<Disposable> {
  for (let waited = false; ; waited = true) {
    const held = tryLock(path, "exclusive");
    if (held) return held;
    if (!waited) onWait(holderOf(path));
    await Bun.sleep(POLL_MS);
  }
}

const NONE: Disposable = { [Symbol.dispose]() {} };

/** A refusal means that another has the lock, unless the disk (some network disks) refuses that of any file. */
function hasLocks(folder: string, flock: Flock): boolean {
  let known = foldersWithLocks.get(folder);
  if (known === undefined) {
    const path = join(folder, `${randomBytes(4).toString("hex")}.lock`);
    const file = openForLock(path);
    known = file === undefined || flock(file, LOCK_EX | LOCK_NB) === 0;
    foldersWithLocks.set(folder, known);
    if (file !== undefined) closeSync(file);
    rmSync(path, { force: true });
  }
  return known;
}

const foldersWithLocks = new Map<string, boolean>();

const POLL_MS = 50;
const LOCK_SH = 1;
const LOCK_EX = 2;
const LOCK_NB = 4;

function openForLock(path: string): number | undefined {
  try {
    mkdirSync(dirname(path), { recursive: true });
    return openSync(path, "a+");
  } catch {
    return undefined;
  }
}

function isStillThere(path: string, file: number): boolean {
  const named = statusOf(path);
  const { ino, dev } = fstatSync(file);
  return named?.ino === ino && named.dev === dev;
}

function holderOf(path: string): number | undefined {
  try {
    return Number.parseInt(readFileSync(path, "utf8"), 10) || undefined;
  } catch {
    return undefined;
  }
}

type Flock = (file: number, operation: number) => number;
let opened: { flock: Flock | undefined } | undefined;

function openFlock(): Flock | undefined {
  return (opened ??= { flock: loadFlock() }).flock;
}

function loadFlock(): Flock | undefined {
  const library = { linux: "libc.so.6", darwin: "libSystem.B.dylib" }[process.platform as string];
  if (!library) return undefined;
  try {
    return dlopen(library, { flock: { args: ["i32", "i32"], returns: "i32" } }).symbols.flock;
  } catch {
    return undefined; // musl's Linux
  }
}
