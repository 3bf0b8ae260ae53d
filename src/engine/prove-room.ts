import { UserError } from "../base/errors.ts";
import { Commands } from "../gpu/commands.ts";
import type { Device } from "../gpu/device.ts";
import { TensorStore } from "../gpu/tensor.ts";
import { largestRead, memoryPlan } from "../weights/memory-plan.ts";
import type { LoadPlan } from "../weights/plan.ts";

export interface Proof {
  /** What the driver gave before it refused; the whole plan where it did not. */
  readonly grantedBytes: number;
  /** In the driver's words. */
  readonly refusal?: string;
}

/**
 * Takes on the device what the plan will take at its peak, and gives it back: what a driver refuses it refuses now, before
 * minutes of fetching and reading. A driver that computes on the CPU never refuses; for it the machine's memory is asked
 * (`gpu/memory.ts`). Weights are taken in the parts in which they will be loaded.
 */
export async function proveRoom(
  device: Device,
  plan: LoadPlan,
  maxBindingBytes = device.maxBindingBytes,
): Promise<Proof> {
  const { plannedBytes, peakBytes } = memoryPlan(plan);
  const store = new TensorStore(device);
  const most = Math.min(maxBindingBytes, device.maxBufferBytes);
  const pieces = [
    ...plan.buffers.map(({ deviceBytes }) => deviceBytes),
    ...plan.weights.map(({ deviceBytes }) => deviceBytes),
    peakBytes - plannedBytes, // what is there only while loading
  ].flatMap((bytes) => partsOf(bytes, most));
  let commands: Commands | undefined;
  // The scopes are answered in order and late: all are asked before one is waited for.
  const outcomes = [
    scoped(device, () => {
      commands = new Commands(device);
      commands.reserveReadback(largestRead(plan));
      return commands.allocatedBytes;
    }),
    ...pieces.map((bytes) => scoped(device, () => store.create("proof", 1, Math.ceil(bytes / 4), "u32").byteLength)),
  ];

  let grantedBytes = 0;
  let refusal: string | undefined;
  for (const { bytes, refused } of outcomes) {
    refusal ??= await refused;
    if (refusal === undefined) grantedBytes += bytes;
  }
  store.destroyAll();
  commands?.destroy();
  await device.reclaim();
  return { grantedBytes, refusal };
}

/** Takes `make`'s bytes in an out-of-memory scope of its own. */
function scoped(device: Device, make: () => number): { bytes: number; refused: Promise<string | undefined> } {
  device.gpu.pushErrorScope("out-of-memory");
  let bytes = 0;
  let said: string | undefined;
  try {
    bytes = make();
  } catch (error) {
    if (!(error instanceof UserError)) throw error;
    said = error.message;
  }
  return { bytes, refused: device.gpu.popErrorScope().then((error) => error?.message ?? said) };
}

function partsOf(bytes: number, most: number): number[] {
  const parts: number[] = [];
  for (let left = bytes; left > 0; left -= most) parts.push(Math.min(left, most));
  return parts;
}
