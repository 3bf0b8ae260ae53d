import { readFileSync } from "node:fs";
import { join } from "node:path";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";

/** The bound that `ulimit -v` (RLIMIT_AS) sets to the addresses of this process, used for memory or only set aside. */
export interface AddressSpace {
  readonly limitBytes: number;
  readonly freeBytes: number;
}

/**
 * What opening a device takes of it, with room for the kernels that the driver compiles. Measured: 0.9 GiB with lavapipe
 * 25.0.7, 0.7 GiB with SwiftShader 5.0.0; with less the process hangs or is killed, in the driver's threads, without a word.
 */
export const DEVICE_ADDRESS_BYTES = 1.25 * 2 ** 30;

/** Undefined without such a bound, and where the system tells of none (only Linux does). */
export function addressSpace(root = "/"): AddressSpace | undefined {
  const limit = numberIn(join(root, "proc/self/limits"), /^Max address space\s+(\d+)/m);
  const used = numberIn(join(root, "proc/self/status"), /^VmSize:\s+(\d+) kB/m);
  if (limit === undefined || used === undefined) return undefined;
  return { limitBytes: limit, freeBytes: Math.max(0, limit - used * 1024) };
}

/** Refuses where opening a device would end this process. @throws UserError `does_not_fit`, which names `ulimit -v`. */
export function requireAddressSpace(space: AddressSpace | undefined = addressSpace()): void {
  if (!space || space.freeBytes >= DEVICE_ADDRESS_BYTES) return;
  const { limitBytes, freeBytes } = space;
  throw new UserError(
    "does_not_fit",
    `ulimit -v gives this process ${formatBytes(limitBytes)} of addresses, of which ${formatBytes(freeBytes)} are left, and opening a device takes ${formatBytes(DEVICE_ADDRESS_BYTES)}`,
    RAISE_ULIMIT,
  );
}

export const RAISE_ULIMIT =
  "start it with ulimit -v unlimited (of a systemd unit: without LimitAS); memory is bounded by --memory-limit or a cgroup";

function numberIn(path: string, pattern: RegExp): number | undefined {
  try {
    const [, digits] = pattern.exec(readFileSync(path, "utf8")) ?? [];
    return digits === undefined ? undefined : Number(digits);
  } catch {
    return undefined;
  }
}
