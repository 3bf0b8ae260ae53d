import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { openStage } from "../engine/open-stage.ts";
import { type OpenedStage, RecoveringStage } from "../engine/recovering-stage.ts";
import type { GpuStage } from "../engine/stage.ts";
import type { Device } from "../gpu/device.ts";
import { silentProgress } from "../hub/progress.ts";
import { memoryPlan } from "../weights/memory-plan.ts";
import { fetchWeights } from "./fetch.ts";
import { explainRefusal, openNodeDevice } from "./node-device.ts";
import type { NodeConfig, NodePlan } from "./plan-node.ts";

/** What opening a node's device, and opening it again, depend on. */
export interface NodeStageParts {
  readonly plan: NodePlan;
  readonly config: Pick<NodeConfig, "device" | "memoryLimit">;
  readonly log: Logger;
}

/** A device, and the promise that resolves with the driver's words when it is lost. */
export interface NodeDevice {
  readonly device: Device;
  readonly lost: Promise<string>;
}

/** @throws what `openNodeDevice` throws. */
export async function claimDevice({ plan, config, log }: NodeStageParts): Promise<NodeDevice> {
  const lost = Promise.withResolvers<string>();
  const opening = openNodeDevice(plan, config, { log, onLost: (_, message) => lost.resolve(message) });
  const device = await unlessLost(opening, lost.promise);
  return { device, lost: lost.promise };
}

/**
 * The stage of the plan, whose weights are on this machine, on its device. When that is lost both are opened anew; `opened` is
 * told each device. `giveUp`: when the node cannot go on.
 */
export async function loadNodeStage(
  first: NodeDevice,
  parts: NodeStageParts,
  { opened, giveUp }: { opened: (device: Device) => void; giveUp: (error: UserError) => void },
): Promise<RecoveringStage> {
  const { plan, config, log } = parts;
  const { info } = first.device;
  const load = async (node: NodeDevice): Promise<OpenedStage> => {
    const { device, lost } = node;
    try {
      const stage = await unlessLost(loadStage(plan, device, log), lost);
      opened(device);
      return { stage, lost, close: () => (stage.destroy(), device.destroy()) };
    } catch (error) {
      device.destroy();
      throw explainRefusal(error, plan, device, config.memoryLimit);
    }
  };
  // `auto` could mean another device the second time, and that one would give other bits.
  const select = ["auto", "cpu"].includes(config.device) ? info.name : config.device;
  const reopen = async (): Promise<OpenedStage> => {
    const again = await claimDevice({ ...parts, config: { ...config, device: select } });
    const { name, description } = again.device.info;
    if (name === info.name && description === info.description) {
      await fetchWeights(plan.snapshot, plan.fetch, silentProgress); // what somebody has pruned meanwhile
      return load(again);
    }
    again.device.destroy();
    const problem = `${info.name} (${info.description}) came back as ${name} (${description})`;
    throw new UserError("device_lost", problem, "start the node again");
  };
  const stage = await load(first).catch((error: unknown) => {
    // While weights were fetched, say.
    if (error instanceof UserError && error.code === "device_lost") return reopen();
    throw error;
  });
  return new RecoveringStage(stage, { name: info.name, reopen, giveUp, log });
}

function unlessLost<T>(work: Promise<T>, lost: Promise<string>): Promise<T> {
  return new Promise((resolve, reject) => {
    work.then(resolve, reject);
    void lost.then((why) => reject(new UserError("device_lost", why, "look at the driver's log")));
  });
}

async function loadStage(plan: NodePlan, device: Device, log: Logger): Promise<GpuStage> {
  const began = performance.now();
  let said = began;
  const stage = await openStage({
    ...plan,
    plan: plan.load,
    device,
    onProgress: (bytes, total) => {
      if (performance.now() - said < PROGRESS_MS) return;
      said = performance.now();
      log.info("loading", { read: formatBytes(bytes), of: formatBytes(total) });
    },
  });
  const loaded = performance.now();
  log.info("warming up", { why: "a driver may compile the kernels now, once" });
  const { keepsOrder } = await stage.warmUp();
  if (!keepsOrder && !plan.load.options.int8Activations) {
    log.warn("order_of_addition", {
      device: device.info.name,
      why: "this driver's compiler changes the order of additions: a token's numbers depend a little on what shares its pass",
    });
  }
  log.info("loaded", {
    seconds: ((loaded - began) / 1000).toFixed(1),
    warmUpSeconds: ((performance.now() - loaded) / 1000).toFixed(1),
    planned: formatBytes(memoryPlan(plan.load).plannedBytes),
    allocated: formatBytes(stage.allocatedBytes),
  });
  return stage;
}

const PROGRESS_MS = 2_000;
