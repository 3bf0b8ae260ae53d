// A process of its own that loads a checkpoint and says what that took: `bun measure-load.ts DIRECTORY DEVICE`.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { silentLogger } from "../../src/base/log.ts";
import { openStage } from "../../src/engine/open-stage.ts";
import { openDevice } from "../../src/gpu/device.ts";
import { readModel } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { memoryPlan } from "../../src/weights/memory-plan.ts";
import { planLoad } from "../../src/weights/plan.ts";

/** Bytes, all of them. */
export interface LoadMeasurement {
  seconds: number;
  readBytes: number;
  plannedBytes: number;
  allocatedBytes: number;
  /** What the device really took of the host's memory, where that shows: shared memory, in lavapipe. */
  deviceResident: number;
  /** The highest resident set while loading, less the one with the device open and idle. */
  peakOverIdle: number;
}

const [directory, select] = process.argv.slice(2) as [string, string];
const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
const options = {
  span: { start: 0, end: config.layers, total: config.layers },
  maxContext: config.maxPositions,
  maxSessions: 1,
  encoding: "bf16" as const,
};
const plan = planLoad(family, config, options, openCheckpoint(directory));
const wanted = { bufferBytes: plan.largestBytes, bindingBytes: plan.largestBytes };
const device = await openDevice({ select, log: silentLogger, wanted });
await device.reclaim();

writeFileSync("/proc/self/clear_refs", "5"); // the high-water mark begins here
const idle = { all: memory("VmRSS"), shared: memory("RssShmem") };
const began = performance.now();
const stage = await openStage({ device, family, config, plan, eosTokenIds: [] });
const measurement: LoadMeasurement = {
  seconds: (performance.now() - began) / 1000,
  readBytes: plan.readBytes,
  plannedBytes: memoryPlan(plan).plannedBytes,
  allocatedBytes: stage.allocatedBytes,
  deviceResident: memory("RssShmem") - idle.shared,
  peakOverIdle: memory("VmHWM") - idle.all,
};
console.log(JSON.stringify(measurement));
process.exit(0);

function memory(field: string): number {
  return Number(new RegExp(`${field}:\\s+(\\d+) kB`).exec(readFileSync("/proc/self/status", "utf8"))![1]) * 1024;
}
