import { lstatSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/**
 * Memory of this machine that nodes which compute on its CPU have been promised. They take it bit by bit: weights when those
 * have been fetched, a cache as it fills. Drivers that compute on the CPU promise the same memory to all, so nodes tell each
 * other by a file for each of them. Linux only.
 */
export interface Claim {
  /** Promised, and not taken yet. */
  readonly outstandingBytes: number;
  /** What `/proc/PID/cgroup` says of its process. */
  readonly cgroup: string;
}

/** A process's file. */
interface Written {
  readonly bytes: number;
  /** What the process had before, and when it began: a pid is given again. */
  readonly heldBytes: number;
  readonly startTime: string;
}

const FOLDER = join(tmpdir(), `meshnet-${process.getuid?.() ?? "user"}`);

/** Where nodes take turns to look and to claim: the file of a lock. Undefined where there is no place for it. */
export const turnFile = (folder = FOLDER): string | undefined =>
  makeOurs(folder) ? join(folder, "turn.lock") : undefined;

/**
 * Claims `bytes` for this process, in place of what it has claimed before, and forgets the claims of processes that are gone.
 * Disposing of it gives them back; the end of the process does too. Does nothing where the folder cannot be written, or is not
 * this user's alone.
 */
export function claimMemory(bytes: number, folder = FOLDER): Disposable {
  const self = processState(process.pid);
  if (!self || !makeOurs(folder)) return { [Symbol.dispose]() {} };
  const path = join(folder, `${process.pid}${SUFFIX}`);
  const giveBack = () => remove(path);
  try {
    for (const pid of pids(folder)) if (!processState(pid)) remove(join(folder, `${pid}${SUFFIX}`));
    const { heldBytes, startTime } = self;
    writeFileSync(path, JSON.stringify({ bytes, heldBytes, startTime } satisfies Written));
    if (!endsAtExit.has(path)) process.once("exit", giveBack);
    endsAtExit.add(path);
  } catch {
    // a disk that is full, say: the node is no worse off than one without others
  }
  return { [Symbol.dispose]: giveBack };
}

function remove(path: string): void {
  try {
    rmSync(path, { force: true });
  } catch {
    // the folder has become read-only: a claim of a process that is gone is none
  }
}

/** What other processes have claimed. */
export function claims(folder = FOLDER): Claim[] {
  if (!isOurs(folder)) return [];
  return pids(folder).flatMap((pid) => {
    const written = pid === process.pid ? undefined : readClaim(join(folder, `${pid}${SUFFIX}`));
    const state = written && processState(pid);
    if (!state || state.startTime !== written.startTime) return [];
    const taken = Math.max(0, state.heldBytes - written.heldBytes);
    return [{ outstandingBytes: Math.max(0, written.bytes - taken), cgroup: state.cgroup }];
  });
}

const SUFFIX = ".claim";
const endsAtExit = new Set<string>();

function pids(folder: string): number[] {
  try {
    return readdirSync(folder).flatMap((name) => (/^\d+\.claim$/.test(name) ? [Number.parseInt(name, 10)] : []));
  } catch {
    return []; // gone just now
  }
}

function makeOurs(folder: string): boolean {
  try {
    mkdirSync(folder, { recursive: true, mode: 0o700 });
  } catch {
    // read-only, or not a folder
  }
  return isOurs(folder);
}

/** In a folder that others can write, a file could be a link to any other file. */
function isOurs(folder: string): boolean {
  try {
    const status = lstatSync(folder);
    return status.isDirectory() && status.uid === process.getuid?.() && (status.mode & 0o022) === 0;
  } catch {
    return false; // not there: no node has claimed anything yet, or none can
  }
}

function readClaim(path: string): Written | undefined {
  try {
    const { bytes, heldBytes, startTime } = JSON.parse(readFileSync(path, "utf8")) as Written;
    return Number.isFinite(bytes) && Number.isFinite(heldBytes) ? { bytes, heldBytes, startTime } : undefined;
  } catch {
    return undefined; // gone just now, or being written
  }
}

/** Undefined where there is no such process, or not Linux's /proc. */
function processState(pid: number): { heldBytes: number; startTime: string; cgroup: string } | undefined {
  try {
    const read = (file: string) => readFileSync(`/proc/${pid}/${file}`, "utf8");
    const status = read("status");
    const kilobytes = (field: string) => Number(new RegExp(`^${field}:\\s+(\\d+) kB`, "m").exec(status)?.[1] ?? 0);
    // Behind the name, which may have anything in it, the 20th field.
    const startTime = read("stat")
      .replace(/^.*\) /s, "")
      .split(" ")[19]!;
    return { heldBytes: (kilobytes("RssAnon") + kilobytes("RssShmem")) * 1024, startTime, cgroup: read("cgroup") };
  } catch {
    return undefined;
  }
}
