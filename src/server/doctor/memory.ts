import { formatBytes } from "../../base/bytes.ts";
import { addressSpace, DEVICE_ADDRESS_BYTES, RAISE_ULIMIT } from "../../gpu/address-space.ts";
import { hostMemory } from "../../gpu/host-memory.ts";
import type { Finding } from "./check.ts";
import { DEADLY, KILLED } from "./child.ts";

/** With less free a node of even the smallest model has no room beside its driver. */
const LITTLE_BYTES = 256 * 2 ** 20;

/** The check of the system says the rest. */
export const NO_ADDRESSES = "not tried, for ulimit -v leaves too few addresses";

/** Of the words in which a probe says why it tried nothing. */
export const lacksAddresses = (problem: string | null | undefined): boolean => problem?.includes("ulimit -v") ?? false;

/** What this process may have: the numbers that make a lack of memory likely. */
export interface MemoryState {
  readonly host: ReturnType<typeof hostMemory>;
  readonly addresses: ReturnType<typeof addressSpace>;
}

export const memoryState = (): MemoryState => ({ host: hostMemory(), addresses: addressSpace() });

/** A lack that is there before anything is tried. */
export function lackOfMemory({
  host,
  addresses,
}: MemoryState): Pick<Finding, "status" | "found" | "remedy"> | undefined {
  if (addresses && addresses.freeBytes < DEVICE_ADDRESS_BYTES) {
    const found = `ulimit -v leaves this process ${formatBytes(addresses.freeBytes)} of addresses of ${formatBytes(addresses.limitBytes)}, and opening a device takes ${formatBytes(DEVICE_ADDRESS_BYTES)}`;
    return { status: "fail", found, remedy: RAISE_ULIMIT };
  }
  if (host.availableBytes >= LITTLE_BYTES) return undefined;
  return { status: "warn", found: `little memory: ${describeHost(host)}`, remedy: giveMore(host) };
}

const describeHost = ({ availableBytes, totalBytes, boundBy }: MemoryState["host"]): string =>
  `${boundBy} has ${formatBytes(availableBytes)} left of ${formatBytes(totalBytes)}`;

const giveMore = (host: MemoryState["host"]): string =>
  `give this process more memory: ${describeHost(host)} (dmesg and the cgroup's memory.events tell of killed processes)`;

/** A driver is not to blame for what a process died of that had no memory left. `problem`: how it ended, in words. */
export function blameMemory(
  problem: string | null | undefined,
  finding: Finding,
  state: () => MemoryState = memoryState,
): Finding {
  if (finding.status === "ok" || finding.status === "skip") return finding;
  const remedy = memoryRemedy(problem, state);
  return remedy === undefined ? finding : { ...finding, remedy };
}

export function memoryRemedy(
  problem: string | null | undefined,
  state: () => MemoryState = memoryState,
): string | undefined {
  if (lacksAddresses(problem)) return RAISE_ULIMIT;
  if (!problem || !DEADLY.test(problem)) return undefined;
  const now = state();
  const lack = lackOfMemory(now);
  if (lack) return lack.remedy ?? undefined;
  return problem.includes(KILLED) ? giveMore(now.host) : undefined;
}
