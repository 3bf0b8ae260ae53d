import { mkdtempSync, readFileSync, rmSync, statSync } from "node:fs";
import { statfs } from "node:fs/promises";
import { arch, availableParallelism, release, totalmem } from "node:os";
import { dirname, join } from "node:path";
import { formatBytes } from "../../base/bytes.ts";
import { messageOf } from "../../base/errors.ts";
import { writableFolders } from "../../gpu/bundled-driver.ts";
import { type Environment, hubSettings, rangeStoreDir } from "../../hub/settings.ts";
import type { Finding } from "./check.ts";
import { lackOfMemory, memoryState } from "./memory.ts";

/** What the program is made of; the command line knows. */
export interface Versions {
  readonly meshnet: string;
  /** Of the npm package webgpu. */
  readonly dawn: string;
  /** One file, rather than a checkout run by Bun. */
  readonly isCompiled: boolean;
}

export const binary = ({ meshnet, dawn, isCompiled }: Versions): Finding => ({
  status: "ok",
  found: `meshnet ${meshnet}, ${isCompiled ? "one file" : "from its source"}, Bun ${Bun.version}, Dawn (webgpu ${dawn})`,
  facts: { meshnet, bun: Bun.version, dawn, compiled: isCompiled, path: process.execPath },
});

/** The machine, and whether it leaves this process the memory without which nothing below can be trusted. */
export function system(state = memoryState()): Finding {
  const distribution = process.platform === "linux" ? distributionName() : null;
  const [platform, cores, memoryBytes] = [process.platform, availableParallelism(), totalmem()];
  const of = distribution === null ? "" : ` (${distribution})`;
  const { host, addresses } = state;
  const own = `${platform} ${release()} ${arch()}${of}, ${cores} cores, ${formatBytes(memoryBytes)} of memory`;
  const facts = {
    platform,
    kernel: release(),
    arch: arch(),
    distribution,
    cores,
    memoryBytes,
    availableBytes: host.availableBytes,
    boundBy: host.boundBy,
    addressBytes: addresses?.limitBytes ?? null,
  };
  const lack = lackOfMemory(state);
  return lack ? { ...lack, found: `${own}; ${lack.found}`, facts } : { status: "ok", found: own, facts };
}

function distributionName(): string | null {
  for (const path of ["/etc/os-release", "/usr/lib/os-release"]) {
    try {
      const [, name] = /^PRETTY_NAME="?([^"\n]*)"?$/m.exec(readFileSync(path, "utf8")) ?? [];
      if (name) return name;
    } catch {
      continue; // a small container has neither
    }
  }
  return null;
}

/** The binary writes the bundled driver's description into a folder for a moment. */
export function temporaryFolder(): Finding {
  const tried = writableFolders();
  const first = tried[0]!;
  const writable = tried.find(({ problem }) => problem === undefined);
  const facts = { tried: tried.map(({ path, problem }) => ({ path, problem: problem ?? null })) };
  const refusals = tried.filter(({ problem }) => problem !== undefined);
  const details = refusals.map(({ path, problem }) => `${path}: ${problem}`);
  if (first.problem === undefined) return { status: "ok", found: `${first.path} can be written`, facts };
  if (writable)
    return {
      status: "warn",
      found: `${first.path} cannot be written; ${writable.path} is used`,
      details,
      remedy: SET_TMPDIR,
      facts,
    };
  return {
    status: "fail",
    found: "no folder can be written, and the bundled software driver needs one for a moment",
    details,
    remedy: SET_TMPDIR,
    facts,
  };
}

const SET_TMPDIR = "set TMPDIR to a folder that can be written; a few hundred bytes are enough";

const LITTLE_BYTES = 2 ** 30;

/** Where models are kept, and how much room is there. */
export async function cache(env: Environment, cacheDir: string | undefined): Promise<Finding> {
  const folders = { models: cacheDir ?? hubSettings(env).cacheDir, parts: rangeStoreDir(env, cacheDir) };
  const places = await Promise.all(Object.values(folders).map(placeOf));
  const facts = { places };
  const refused = places.find(({ problem }) => problem !== null);
  if (refused) {
    return {
      status: "fail",
      found: `${refused.path} cannot be written: ${refused.problem}`,
      remedy: "make it writable, or name another place with --cache-dir, HF_HOME or XDG_CACHE_HOME",
      facts,
    };
  }
  const frees = places.map(({ freeBytes }) => freeBytes).filter((bytes) => bytes !== null);
  const free = frees.length > 0 ? Math.min(...frees) : null;
  const room = free === null ? "the disk does not tell its free space" : `${formatBytes(free)} free`;
  const found = `${folders.parts} can be written, ${room}`;
  const details = [`whole files: ${folders.models}`, `parts that nodes fetch: ${folders.parts}`];
  if (free !== null && free < LITTLE_BYTES) {
    const remedy = "make room (meshnet cache prune), or name another place with --cache-dir";
    return { status: "warn", found: `${found}: less than most models take`, details, remedy, facts };
  }
  return { status: "ok", found, details, facts };
}

interface Place {
  readonly path: string;
  readonly freeBytes: number | null;
  readonly problem: string | null;
}

/** A folder that is not there yet is as good as the nearest one above it. Nothing is left behind. */
async function placeOf(path: string): Promise<Place> {
  let there = path;
  while (!exists(there) && dirname(there) !== there) there = dirname(there);
  try {
    rmSync(mkdtempSync(join(there, ".meshnet-doctor-")), { recursive: true });
    const { bavail, bsize, blocks } = await statfs(there);
    return { path, freeBytes: blocks === 0 ? null : bavail * bsize, problem: null }; // some network disks do not tell
  } catch (error) {
    return { path, freeBytes: null, problem: messageOf(error) };
  }
}

function exists(path: string): boolean {
  try {
    statSync(path);
    return true;
  } catch {
    return false;
  }
}
