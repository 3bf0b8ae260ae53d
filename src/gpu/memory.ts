import { messageOf } from "../base/errors.ts";
import type { AdapterSummary } from "./adapter.ts";
import { hostMemory, type HostMemory } from "./host-memory.ts";
import { vulkanDevices, type VulkanDevice } from "./vulkan-memory.ts";

/** Bytes of memory in which a device keeps buffers. WebGPU tells nothing of it. */
export interface DeviceMemory {
  /** Null where the system does not tell. */
  readonly totalBytes: number | null;
  /** What can be taken now, beside what this process has already. Null where the system does not tell. */
  readonly availableBytes: number | null;
  /** Where the numbers are from, for people: "VK_EXT_memory_budget of the driver". */
  readonly source: string;
  /** Not what the system says of this device now, but what may be expected of one like it. */
  readonly isEstimate: boolean;
}

/** What is asked for the numbers; tests put in their own. */
export interface MemorySources {
  readonly platform: NodeJS.Platform;
  readonly host: () => HostMemory;
  /** May throw: there may be no Vulkan. */
  readonly vulkan: () => VulkanDevice[];
}

const SYSTEM: MemorySources = {
  platform: process.platform,
  host: () => hostMemory(),
  vulkan: () => vulkanDevices(),
};

/** What `deviceMemory` needs to know of an adapter. */
export type MemoryOf = Pick<AdapterSummary, "name" | "isSoftware"> & {
  /** Which of several adapters with this name, from 0 on. */
  readonly nameIndex?: number;
};

/**
 * How much memory the device has. One that computes on the CPU has the machine's, as far as cgroups allow (its driver never
 * refuses memory, and names heaps that are fiction). A GPU's is what Vulkan says of the device of the same name. Apple's
 * GPUs share the machine's memory; how much of it they may take is estimated. docs/memory.md has the details.
 */
export function deviceMemory(adapter: MemoryOf, sources: MemorySources = SYSTEM): DeviceMemory {
  if (adapter.isSoftware) return softwareMemory(sources);
  if (sources.platform === "darwin") return appleMemory(sources);
  return vulkanMemory(adapter, sources);
}

function softwareMemory({ host }: MemorySources): DeviceMemory {
  const { totalBytes, availableBytes, boundBy } = host();
  return { totalBytes, availableBytes, source: `memory of ${boundBy}`, isEstimate: false };
}

/** Metal lets a process have two thirds of a small machine's memory and three quarters of a large one's by default. */
function appleMemory({ host }: MemorySources): DeviceMemory {
  const total = host().totalBytes;
  const share = Math.floor(total <= 36 * GIB ? (total / 3) * 2 : (total / 4) * 3);
  return {
    totalBytes: share,
    availableBytes: share,
    source: "the share of the machine's memory that Metal gives a GPU by default",
    isEstimate: true,
  };
}

function vulkanMemory({ name, nameIndex = 0 }: MemoryOf, { vulkan, host }: MemorySources): DeviceMemory {
  let devices: VulkanDevice[];
  try {
    devices = vulkan();
  } catch (error) {
    return unknown(`Vulkan cannot be asked: ${messageOf(error)}`);
  }
  const device = devices.filter((one) => one.name === name)[nameIndex];
  const heaps = device?.heaps.filter(({ isDeviceLocal }) => isDeviceLocal) ?? [];
  // The largest only: a small one beside it is a window into it, through which the CPU writes.
  const heap = heaps.toSorted((a, b) => b.sizeBytes - a.sizeBytes)[0];
  if (!device || !heap) return unknown(`Vulkan knows no device called ${name} with memory of its own`);

  const { sizeBytes, budget } = heap;
  const free = budget
    ? Math.max(0, budget.budgetBytes - budget.usageBytes)
    : Math.floor(sizeBytes * SHARE_WITHOUT_BUDGET);
  const own = {
    totalBytes: sizeBytes,
    source: budget
      ? "the memory budget of the Vulkan driver"
      : "nine tenths of the memory that the Vulkan driver names",
    isEstimate: budget === undefined,
  };
  if (device.type !== "integrated") return { ...own, availableBytes: free };
  const { availableBytes, boundBy } = host(); // which it shares
  if (availableBytes >= free) return { ...own, availableBytes: free };
  return { ...own, availableBytes, source: `memory of ${boundBy}, which the GPU shares` };
}

const unknown = (source: string): DeviceMemory => ({
  totalBytes: null,
  availableBytes: null,
  source,
  isEstimate: true,
});

/** A desktop, and whoever else uses the GPU, has the rest. */
const SHARE_WITHOUT_BUDGET = 0.9;
const GIB = 2 ** 30;
