import { formatBytes, roundUp } from "../base/bytes.ts";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { type AdapterSummary, allAdapters, findAdapter } from "./adapter.ts";
import { requireAddressSpace } from "./address-space.ts";
import { captureStderr } from "./capture-stderr.ts";

export type { AdapterSummary } from "./adapter.ts";

export interface DeviceOptions {
  /** `--device`: any, a software one, or a part of its name (`swiftshader` is the bundled one). */
  select: "auto" | "cpu" | (string & {});
  log: Logger;
  /** What the load plan needs, in bytes: its largest buffer and the largest part of one that a kernel binds. */
  wanted: { bufferBytes: number; bindingBytes: number };
  /** The driver reset, the GPU was removed: everything on it is gone. Not called for our own `destroy`. */
  onLost?: (message: string) => void;
  /** A GPU error nobody awaits, i.e. a bug of ours. By default one line in the log; tests make it fatal. */
  onUncapturedError?: (message: string) => void;
}

export interface DeviceInfo extends AdapterSummary {
  /** Lanes of a subgroup, at least and at most; 0 without subgroups. */
  subgroupMinSize: number;
  subgroupMaxSize: number;
}

/**
 * Opens the device that `select` means, with limits raised as far as `wanted` and the adapter allow: what the device
 * then has may be less than wanted (see `maxBindingBytes`), since a large weight can be split by rows. Warns when it
 * computes on the CPU. Throws UserError "no_device" with the adapters there are; "does_not_fit" below a `ulimit -v` in which
 * drivers do not live.
 */
export function openDevice(options: DeviceOptions): Promise<Device> {
  return inTurn(async () => {
    requireAddressSpace();
    const { adapter, summary } = await findAdapter(options.select, options.log);
    const gpu = await captureStderr(options.log, () =>
      adapter.requestDevice({
        label: summary.name,
        requiredFeatures: USEFUL_FEATURES.filter((feature) => adapter.features.has(feature)),
        requiredLimits: limitsFor(adapter.limits, options.wanted),
      }),
    );
    const { subgroupMinSize = 0, subgroupMaxSize = 0 } = gpu.features.has("subgroups") ? adapter.info : {};
    const device = new Device(gpu, { ...summary, subgroupMinSize, subgroupMaxSize }, options);
    announce(device.info, options.log);
    return device;
  });
}

/** Every adapter there is, the bundled one last. */
export function listAdapters(log: Logger): Promise<AdapterSummary[]> {
  return inTurn(async () => {
    requireAddressSpace();
    return (await allAdapters(log)).map(({ summary }) => summary);
  });
}

export class Device {
  readonly gpu: GPUDevice;
  readonly info: DeviceInfo;
  readonly hasSubgroups: boolean;
  readonly hasF16: boolean;
  #closing = false;
  #uncapturedErrors = 0;
  #outOfMemoryErrors = 0;

  constructor(gpu: GPUDevice, info: DeviceInfo, { log, onLost, onUncapturedError }: DeviceOptions) {
    this.gpu = gpu;
    this.info = info;
    this.hasSubgroups = gpu.features.has("subgroups");
    this.hasF16 = gpu.features.has("shader-f16");
    void gpu.lost.then(({ message }) => this.#closing || onLost?.(message));
    gpu.addEventListener("uncapturederror", (event) => {
      event.preventDefault(); // Dawn would print it on stdout, into somebody's --json
      this.#uncapturedErrors++;
      const { error } = event as GPUUncapturedErrorEvent;
      if (error instanceof GPUOutOfMemoryError) this.#outOfMemoryErrors++;
      if (onUncapturedError) onUncapturedError(error.message);
      else log.error("gpu_error", { device: info.name, kind: error.constructor.name, message: error.message });
    });
  }

  /** How many GPU errors nobody awaited. What was computed while one came in cannot be trusted. */
  get uncapturedErrors(): number {
    return this.#uncapturedErrors;
  }

  /** Those of them that came because the device had no memory left. */
  get outOfMemoryErrors(): number {
    return this.#outOfMemoryErrors;
  }

  get limits(): GPUSupportedLimits {
    return this.gpu.limits;
  }

  /** The largest part of a buffer that a kernel can bind. */
  get maxBindingBytes(): number {
    return Math.min(roundDown(this.limits.maxStorageBufferBindingSize), this.maxBufferBytes);
  }

  /**
   * The largest buffer the device may refuse only for lack of memory. One of exactly the advertised limit fails on both
   * software drivers (lavapipe's 2^32 - 1, SwiftShader's 1 GiB); a step of 256 bytes below it works.
   */
  get maxBufferBytes(): number {
    return roundDown(this.limits.maxBufferSize - 1);
  }

  /**
   * A lack of memory shows in an `out-of-memory` error scope, and the buffer is of no use then.
   * @throws UserError `does_not_fit` where the runtime says it at once.
   */
  createBuffer(descriptor: GPUBufferDescriptor): GPUBuffer {
    try {
      return this.gpu.createBuffer(descriptor);
    } catch (cause) {
      if (cause instanceof TypeError) throw cause; // a bug of ours
      throw new UserError(
        "does_not_fit",
        `${this.info.name} refused ${formatBytes(descriptor.size)} (${descriptor.label ?? "a buffer"}): ${messageOf(cause)}`,
        "take fewer layers (--shard-end) or a shorter context (--max-context)",
        { cause },
      );
    }
  }

  /**
   * Resolves when all submitted work is done and the memory of destroyed buffers has been given back. Dawn returns it
   * at a submission only, not when a buffer is destroyed or collected. (On SwiftShader about 1 buffer in 1000 waits for
   * the submission after that.)
   */
  async reclaim(): Promise<void> {
    this.gpu.queue.submit([]);
    await this.gpu.queue.onSubmittedWorkDone();
  }

  /** Gives everything back. The device is of no use afterwards; a second call does nothing. */
  destroy(): void {
    this.#closing = true;
    this.gpu.destroy();
  }
}

const USEFUL_FEATURES: GPUFeatureName[] = ["subgroups", "shader-f16", "timestamp-query"];

/** Without these a device gets WebGPU's defaults: 128 MiB bindings, 256 MiB buffers, 16 KiB of workgroup memory. */
function limitsFor(adapter: GPUSupportedLimits, wanted: DeviceOptions["wanted"]): Record<string, number> {
  const atLeast = (least: number, wish: number, most: number) => Math.min(Math.max(least, wish), most);
  const bufferBytes = roundUp(wanted.bufferBytes, LIMIT_STEP) + LIMIT_STEP; // see `maxBufferBytes`
  const bindingBytes = roundUp(wanted.bindingBytes, LIMIT_STEP);
  return {
    maxBufferSize: atLeast(256 * MIB, bufferBytes, adapter.maxBufferSize),
    maxStorageBufferBindingSize: atLeast(128 * MIB, bindingBytes, adapter.maxStorageBufferBindingSize),
    maxStorageBuffersPerShaderStage: adapter.maxStorageBuffersPerShaderStage,
    maxComputeWorkgroupStorageSize: adapter.maxComputeWorkgroupStorageSize,
    maxComputeInvocationsPerWorkgroup: adapter.maxComputeInvocationsPerWorkgroup,
    maxComputeWorkgroupSizeX: adapter.maxComputeWorkgroupSizeX,
    maxComputeWorkgroupsPerDimension: adapter.maxComputeWorkgroupsPerDimension,
  };
}

const MIB = 2 ** 20;
/** The largest alignment that WebGPU asks of a binding's offset. */
const LIMIT_STEP = 256;
const roundDown = (bytes: number): number => bytes - (bytes % LIMIT_STEP);

function announce(info: DeviceInfo, log: Logger): void {
  log.info("device", { name: info.name, driver: info.description });
  if (info.bundledDriver)
    log.warn("software_device", {
      device: info.name,
      cost: "computes on the CPU with the bundled driver, about 3 times slower than Mesa's, itself far slower than a GPU",
      remedy: "install your GPU's Vulkan driver, or Mesa 23.1 or newer (Debian, Ubuntu: mesa-vulkan-drivers)",
    });
  else if (info.isSoftware)
    log.warn("software_device", {
      device: info.name,
      cost: "computes on the CPU: expect tens of times slower than a GPU",
      remedy: "install your GPU's Vulkan driver if this machine has a GPU",
    });
}

/**
 * One after the other: the bundled driver is chosen by environment variables of the whole process, and stderr is held
 * back for the whole process.
 */
function inTurn<T>(work: () => Promise<T>): Promise<T> {
  const result = turn.then(work);
  turn = result.catch(() => {});
  return result;
}

let turn: Promise<unknown> = Promise.resolve();
