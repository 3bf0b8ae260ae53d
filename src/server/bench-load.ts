import { readFileSync, writeFileSync } from "node:fs";
import { Commands } from "../gpu/commands.ts";
import { type Device, openDevice } from "../gpu/device.ts";
import { PipelineCache } from "../gpu/kernel.ts";
import { TensorStore } from "../gpu/tensor.ts";
import { RangeReader } from "../safetensors/range-reader.ts";
import { loadWeights } from "../weights/load.ts";
import type { LoadPlan } from "../weights/plan.ts";
import { planNode, type Surroundings } from "./plan-node.ts";

export interface LoadBenchmark {
  readonly device: string;
  readonly readBytes: number;
  readonly tensors: number;
  /** Seconds of each run. */
  readonly seconds: Readonly<Record<Way, readonly number[]>>;
  /** The highest resident set of a load above the one before it and the device's own; undefined where it is not told. */
  readonly hostBytes: number | undefined;
}

/** The same bytes of the same tensors: read; read and put on the device as they are; loaded as a node does. */
export type Way = "read" | "upload" | "load";

/** Bytes that are read and written at a time, as in a load. */
const PIECE_BYTES = 2 ** 20;
/** The most of a tensor that one plain buffer takes: any device has as much. */
const BUFFER_BYTES = 64 * 2 ** 20;
const SETTLE_BYTES = 2 * 2 ** 20;

/**
 * Times loading all layers of a model in a directory against the least that it could be, way after way in turn. The
 * first round reads the files into the system's cache and compiles the kernels, and is not counted but for its memory.
 */
export async function benchLoad(
  { directory, device: select, runs }: { directory: string; device: string; runs: number },
  surroundings: Surroundings,
): Promise<LoadBenchmark> {
  const local = {
    shardStart: 0,
    host: "",
    port: 0,
    allowedHosts: [],
    allowedOrigins: [],
    quantization: "bfloat16" as const,
    offline: true,
  };
  const { load: plan } = await planNode({ ...local, modelId: directory, device: select }, surroundings);
  const wanted = { bufferBytes: plan.largestBytes, bindingBytes: plan.largestBytes };
  const device = await openDevice({ select, log: surroundings.log, wanted });
  try {
    const seconds = { read: [] as number[], upload: [] as number[], load: [] as number[] };
    const hostBytes: number[] = [];
    for (let run = 0; run <= runs; run++) {
      const load = await timeLoad(plan, device);
      hostBytes.push(load.hostBytes ?? Number.NaN);
      const read = timeRead(plan);
      const upload = await timeUpload(plan, device);
      if (run === 0) continue;
      seconds.load.push(load.seconds);
      seconds.read.push(read);
      seconds.upload.push(upload);
    }
    const { readBytes, weights } = plan;
    const most = Math.max(...hostBytes);
    return {
      device: device.info.name,
      readBytes,
      tensors: weights.length,
      seconds,
      hostBytes: Number.isNaN(most) ? undefined : most,
    };
  } finally {
    device.destroy();
  }
}

async function timeLoad(plan: LoadPlan, device: Device): Promise<{ seconds: number; hostBytes: number | undefined }> {
  const store = new TensorStore(device);
  const commands = new Commands(device);
  const { label, rows, columns, type } = plan.buffers.find((buffer) => buffer.label === "upload")!;
  const upload = store.create(label, rows, columns, type);
  await device.reclaim();
  const before = beginPeak();
  const began = performance.now();
  await loadWeights(plan, {
    device,
    store,
    commands,
    upload,
    pipelines: PipelineCache.of(device),
    maxBindingBytes: device.maxBindingBytes,
  });
  const seconds = secondsSince(began);
  const peak = memory("VmHWM");
  const deviceBytes = device.info.isSoftware ? store.allocatedBytes : 0; // its memory is the host's
  store.destroyAll();
  commands.destroy();
  await device.reclaim();
  return { seconds, hostBytes: before === undefined || peak === undefined ? undefined : peak - before - deviceBytes };
}

function timeRead({ weights }: LoadPlan): number {
  using reader = new RangeReader();
  const piece = new Uint8Array(PIECE_BYTES);
  const began = performance.now();
  for (const { source } of weights) {
    for (let at = source.begin; at < source.end; at += PIECE_BYTES) {
      reader.read(source.file, at, piece.subarray(0, source.end - at));
    }
  }
  return secondsSince(began);
}

async function timeUpload({ weights }: LoadPlan, device: Device): Promise<number> {
  using reader = new RangeReader();
  const store = new TensorStore(device);
  const piece = new Uint8Array(PIECE_BYTES);
  const began = performance.now();
  let unsettled = 0;
  for (const { source } of weights) {
    for (let begin = source.begin; begin < source.end; begin += BUFFER_BYTES) {
      const end = Math.min(begin + BUFFER_BYTES, source.end);
      const buffer = store.create(source.name, 1, Math.ceil((end - begin) / 4), "u32");
      for (let at = begin; at < end; at += PIECE_BYTES) {
        const length = Math.min(PIECE_BYTES, end - at);
        reader.read(source.file, at, piece.subarray(0, length));
        store.write(buffer, piece.subarray(0, Math.ceil(length / 4) * 4), at - begin);
        unsettled += length;
        if (unsettled < SETTLE_BYTES) continue;
        unsettled = 0;
        await device.reclaim();
      }
      if (end - begin === BUFFER_BYTES) store.destroy(buffer);
    }
  }
  await device.reclaim();
  const seconds = secondsSince(began);
  store.destroyAll();
  await device.reclaim();
  return seconds;
}

const secondsSince = (began: number): number => (performance.now() - began) / 1000;

/** Begins a new high-water mark of the resident set and gives what it begins at. Linux only. */
function beginPeak(): number | undefined {
  try {
    writeFileSync("/proc/self/clear_refs", "5");
  } catch {
    return undefined;
  }
  return memory("VmRSS");
}

function memory(field: "VmRSS" | "VmHWM"): number | undefined {
  try {
    const [, kilobytes] = new RegExp(`${field}:\\s+(\\d+) kB`).exec(readFileSync("/proc/self/status", "utf8")) ?? [];
    return kilobytes === undefined ? undefined : Number(kilobytes) * 1024;
  } catch {
    return undefined;
  }
}
