import { readFileSync } from "node:fs";
import { freemem, totalmem } from "node:os";
import { dirname, join } from "node:path";
import { formatBytes, sum } from "../base/bytes.ts";
import { addressSpace } from "./address-space.ts";
import { type Claim, claims } from "./claims.ts";

/** Memory of the machine, as far as this process may have it. */
export interface HostMemory {
  readonly totalBytes: number;
  /** What can still be taken before something is killed or swapped out, less what other nodes were promised of it. */
  readonly availableBytes: number;
  /** What sets the bound: the machine, the folder of the cgroup that does, or `ulimit -v`; and what others were promised. */
  readonly boundBy: string;
}

/**
 * What the machine, this process's cgroups (version 2 or 1, with all that they lie in) and `ulimit -v` can give. The Linux
 * kernel's files are read below `root`; elsewhere the system's own figures are taken.
 */
export function hostMemory(root = "/", others: readonly Claim[] = claims()): HostMemory {
  const whole = machineMemory(root);
  const machine = less(whole, others);
  const bounds =
    process.platform === "linux" ? [...cgroupBounds(root, whole.totalBytes, others), ...addressBound(root)] : [];
  return bounds.reduce(
    (least, bound) => ({
      totalBytes: Math.min(least.totalBytes, bound.totalBytes),
      ...(bound.availableBytes < least.availableBytes
        ? { availableBytes: bound.availableBytes, boundBy: bound.boundBy }
        : { availableBytes: least.availableBytes, boundBy: least.boundBy }),
    }),
    machine,
  );
}

/** What is left when the others have taken what they were promised. */
function less({ totalBytes, availableBytes, boundBy }: HostMemory, others: readonly Claim[]): HostMemory {
  const promised = sum(others.map(({ outstandingBytes }) => outstandingBytes));
  if (promised === 0) return { totalBytes, availableBytes, boundBy };
  return {
    totalBytes,
    availableBytes: Math.max(0, availableBytes - promised),
    boundBy: `${boundBy}, less ${formatBytes(promised)} that other nodes were promised`,
  };
}

/** What is mapped needs addresses, of which `ulimit -v` may leave fewer than there is memory. */
function addressBound(root: string): HostMemory[] {
  const space = addressSpace(root);
  if (!space) return [];
  const availableBytes = Math.max(0, space.freeBytes - SET_ASIDE_BYTES);
  return [{ totalBytes: space.limitBytes, availableBytes, boundBy: "this process (ulimit -v)" }];
}

/**
 * Addresses that a node sets aside beside what it plans: stacks and arenas of the driver's threads, the runtime's heap.
 * Measured after its start: 0.2 GiB with lavapipe, 0.9 GiB with SwiftShader; 0.3 GiB more or less from start to start.
 */
const SET_ASIDE_BYTES = 1.5 * 2 ** 30;

function machineMemory(root: string): HostMemory {
  const fields = process.platform === "linux" ? fieldsOf(read(join(root, "proc/meminfo"))) : {};
  const total = fields["MemTotal"];
  // Older than Linux 3.14: what is free, and the files that it could forget.
  const available = fields["MemAvailable"] ?? sumOf(fields, ["MemFree", "Buffers", "Cached"]);
  if (total === undefined || available === undefined)
    return { totalBytes: totalmem(), availableBytes: freemem(), boundBy: "the machine" };
  return { totalBytes: total * KIB, availableBytes: available * KIB, boundBy: "the machine" };
}

/** What a version of cgroups calls its files. */
interface Hierarchy {
  readonly mount: string;
  readonly limits: readonly string[];
  readonly usage: string;
  /** Of memory.stat: pages of files, which the kernel gives up first. */
  readonly reclaimable: readonly string[];
}

const VERSION_2: Omit<Hierarchy, "mount"> = {
  limits: ["memory.max", "memory.high"],
  usage: "memory.current",
  reclaimable: ["inactive_file", "active_file"],
};
const VERSION_1: Omit<Hierarchy, "mount"> = {
  limits: ["memory.limit_in_bytes"],
  usage: "memory.usage_in_bytes",
  reclaimable: ["total_inactive_file", "total_active_file"],
};

/** The bound of each cgroup on the way from this process's own up to the root, where it sets one. */
function cgroupBounds(root: string, machineBytes: number, others: readonly Claim[]): HostMemory[] {
  const mount = join(root, "sys/fs/cgroup");
  return (read(join(root, "proc/self/cgroup")) ?? "").split("\n").flatMap((line) => {
    const [, controllers, path] = /^\d+:([^:]*):(\/.*)$/.exec(line) ?? [];
    if (controllers === undefined || path === undefined) return [];
    if (controllers === "") {
      // Beside version 1, version 2 lies one folder deeper, and has memory.* only where version 1 has let it go.
      const at = [mount, join(mount, "unified")].find(
        (folder) => read(join(folder, "cgroup.controllers")) !== undefined,
      );
      return boundsUpwards({ ...VERSION_2, mount: at ?? mount }, path, machineBytes, others);
    }
    if (!controllers.split(",").includes("memory")) return [];
    return boundsUpwards({ ...VERSION_1, mount: join(mount, "memory") }, path, machineBytes, others);
  });
}

/** In a container the path may be that outside of it: folders that are not there set no bound. */
function boundsUpwards(
  hierarchy: Hierarchy,
  path: string,
  machineBytes: number,
  others: readonly Claim[],
): HostMemory[] {
  const bounds: HostMemory[] = [];
  for (let at = path; ; at = dirname(at)) {
    const bound = boundOf(hierarchy, join(hierarchy.mount, at).replace(/\/$/, ""), machineBytes);
    const within = others.filter(({ cgroup }) => liesIn(at, cgroup));
    if (bound) bounds.push(less(bound, within));
    if (at === "/") return bounds;
  }
}

/** Whether a process is in the cgroup or below it, by its lines of `number:controllers:path`. */
const liesIn = (cgroup: string, lines: string): boolean =>
  lines.split("\n").some((line) => {
    const path = line.replace(/^\d+:[^:]*:/, "");
    return path === cgroup || path.startsWith(cgroup === "/" ? "/" : `${cgroup}/`);
  });

function boundOf(hierarchy: Hierarchy, folder: string, machineBytes: number): HostMemory | undefined {
  const number = (name: string) => wholeNumber(read(join(folder, name)));
  const limits = hierarchy.limits.map(number).filter((limit) => limit !== undefined);
  const limit = Math.min(...limits); // "max" is no number, and version 1 spells it as one beyond any machine
  if (!(limit < machineBytes)) return undefined;
  const stat = fieldsOf(read(join(folder, "memory.stat")));
  const reclaimable = sumOf(stat, hierarchy.reclaimable) ?? 0;
  const used = Math.max(0, (number(hierarchy.usage) ?? 0) - reclaimable);
  return { totalBytes: limit, availableBytes: Math.max(0, limit - used), boundBy: `the cgroup ${folder}` };
}

/** `MemTotal:  24684092 kB` and `inactive_file 4096` alike. */
function fieldsOf(text: string | undefined): Record<string, number | undefined> {
  return Object.fromEntries(
    Array.from((text ?? "").matchAll(/^(\w+):?\s+(\d+)/gm), ([, name, value]) => [name!, Number(value)]),
  );
}

/** Of those that are there; undefined where none is. */
function sumOf(fields: Record<string, number | undefined>, names: readonly string[]): number | undefined {
  const values = names.map((name) => fields[name]).filter((value) => value !== undefined);
  return values.length === 0 ? undefined : values.reduce((total, value) => total + value);
}

const wholeNumber = (text: string | undefined): number | undefined =>
  text !== undefined && /^\d+$/.test(text.trim()) ? Number(text) : undefined;

function read(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return undefined; // not Linux, another version of cgroups, or none: each is ordinary
  }
}

const KIB = 1024;
