import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { type Logger, silentLogger } from "../base/log.ts";
import { proveRoom } from "../engine/prove-room.ts";
import { claimMemory, turnFile } from "../gpu/claims.ts";
import { type Device, openDevice } from "../gpu/device.ts";
import { deviceMemory } from "../gpu/memory.ts";
import { lock } from "../hub/lock.ts";
import type { MemoryInfo } from "../protocol/info.ts";
import { memoryPlan } from "../weights/memory-plan.ts";
import { checkFit, fitQuestion, refusedByDriver, roomOf } from "./fit.ts";
import { type NodeConfig, type NodePlan, planNode, type Surroundings } from "./plan-node.ts";

/**
 * Opens the device that the plan is for, and makes sure that it fits: by what is known of the memory, then by taking it all
 * once. Nothing of the weights has to be there yet.
 * @throws UserError `no_device`; `does_not_fit` with a table of what needs what, and changes that would fit.
 */
export async function openNodeDevice(
  plan: NodePlan,
  config: Pick<NodeConfig, "device" | "memoryLimit">,
  { log, onLost }: { log: Logger; onLost: (device: Device, message: string) => void },
): Promise<Device> {
  const { load } = plan;
  const device: Device = await openDevice({
    select: config.device,
    log,
    wanted: { bufferBytes: load.largestBytes, bindingBytes: load.largestBytes },
    onLost: (message) => onLost(device, message),
  });
  let claim: Disposable | undefined;
  try {
    // Nodes that start at once look one after the other: each counts what those before it were promised.
    const turn = device.info.isSoftware ? turnFile() : undefined;
    using _turn = turn === undefined ? undefined : await lock(turn, () => {});
    const question = fitQuestion(plan, roomOf(device, config.memoryLimit));
    const { neededBytes, peakBytes } = checkFit(question);
    if (device.info.isSoftware) claim = claimMemory(neededBytes);
    const { availableBytes, source } = question.room.memory;
    log.info("memory", {
      needed: formatBytes(neededBytes),
      ofThatOurs: formatBytes(peakBytes),
      available: availableBytes === null ? "unknown" : formatBytes(availableBytes),
      limit: config.memoryLimit === undefined ? undefined : formatBytes(config.memoryLimit),
      source,
    });
    const { grantedBytes, refusal } = await proveRoom(device, load);
    if (refusal !== undefined) throw refusedByDriver(question, grantedBytes, refusal);
    return device;
  } catch (error) {
    claim?.[Symbol.dispose]();
    device.destroy();
    throw error;
  }
}

/**
 * Whole files are gigabytes: whether the node would fit is looked at before they are fetched, from their headers. Where the
 * server gives no ranges it cannot be, and is when they are here.
 * @throws what `openNodeDevice` throws.
 */
export async function checkBeforeWholeFiles(config: NodeConfig, surroundings: Surroundings): Promise<void> {
  const plan = await planNode({ ...config, wholeFiles: false }, { ...surroundings, log: silentLogger }).catch(
    (error: unknown) => {
      if (error instanceof UserError && error.code === "download") return undefined;
      throw error;
    },
  );
  if (!plan) return;
  try {
    const device = await openNodeDevice(plan, config, { log: silentLogger, onLost: () => {} });
    device.destroy();
  } finally {
    plan.snapshot[Symbol.dispose]();
  }
}

/** The same refusal where the driver says no later, while the stage is opened. */
export function explainRefusal(error: unknown, plan: NodePlan, device: Device, limitBytes?: number): unknown {
  if (!(error instanceof UserError) || error.code !== "does_not_fit") return error;
  const { granted } = error.details;
  if (typeof granted !== "number") return error;
  return refusedByDriver(fitQuestion(plan, roomOf(device, limitBytes)), granted, error.message);
}

/** For `/info`. The system is asked at most every few seconds: it takes tens of milliseconds, in which nobody is served. */
export function memoryMeter(
  plan: NodePlan,
  device: Device,
  stage: { readonly allocatedBytes: number },
  limitBytes?: number,
): () => MemoryInfo {
  const planned = memoryPlan(plan.load).plannedBytes;
  let askedAt = -Infinity;
  let free: number | null = null;
  return () => {
    if (performance.now() - askedAt > FRESH_MS) {
      askedAt = performance.now();
      free = deviceMemory(device.info).availableBytes;
    }
    const allocated = stage.allocatedBytes;
    if (limitBytes === undefined) return { planned, allocated, available: free };
    const left = Math.max(0, limitBytes - allocated);
    return { planned, allocated, available: Math.min(left, free ?? left), limit: limitBytes, device_available: free };
  };
}

const FRESH_MS = 5_000;
