import { dlopen } from "bun:ffi";
import { readFileSync, realpathSync } from "node:fs";
import { messageOf, UserError } from "../../base/errors.ts";
import { hasLibc, libc } from "../../base/libc.ts";
import { createLogger, type Logger } from "../../base/log.ts";
import { measureCopy } from "../../engine/bench-copy.ts";
import { timeKernels } from "../../engine/bench-kernels.ts";
import { runSelfTests, type SelfTestResult } from "../../engine/self-test/index.ts";
import { requireAddressSpace } from "../../gpu/address-space.ts";
import { type DawnOrigin, dawnOrigin } from "../../gpu/dawn.ts";
import { type AdapterSummary, type Device, listAdapters, openDevice } from "../../gpu/device.ts";
import { loadProblem, preload } from "../../gpu/native-library.ts";
import { hasPackedDot } from "../../gpu/language.ts";
import { type DeviceMemory, deviceMemory } from "../../gpu/memory.ts";
import { vulkanDevices, type VulkanDevice, vulkanLoaderVersion } from "../../gpu/vulkan-memory.ts";

/** What a child process is asked to look at. */
export type ProbeRequest =
  | { readonly probe: "libraries" }
  | { readonly probe: "runtime" }
  /** `withRuntime`: in a process that has loaded Dawn, as a node has, with the C++ runtime that Dawn may bring. */
  | { readonly probe: "loader" | "driver"; readonly withRuntime: boolean }
  | { readonly probe: "adapters" }
  | { readonly probe: "adapter"; readonly name: string; readonly quick: boolean }
  | { readonly probe: "default"; readonly select: string };

/** What it says, in the order in which it learns it. The last one before a crash tells in what it crashed. */
export type ProbeEvent =
  | { readonly event: "step"; readonly what: string }
  | { readonly event: "error"; readonly message: string; readonly hint: string | null }
  | {
      readonly event: "libraries";
      readonly glibc: string | null;
      readonly libstdcxx: string | null;
      readonly libstdcxxProblem: string | null;
    }
  | { readonly event: "dawn"; readonly origin: DawnOrigin }
  | { readonly event: "loader"; readonly version: string; readonly path: string | null }
  | { readonly event: "devices"; readonly devices: readonly VulkanDevice[] }
  | { readonly event: "adapters"; readonly adapters: readonly AdapterSummary[]; readonly warnings: readonly string[] }
  | { readonly event: "adapter"; readonly adapter: AdapterFacts }
  | { readonly event: "kernel"; readonly result: SelfTestResult }
  | { readonly event: "tested"; readonly seconds: number }
  | { readonly event: "speed"; readonly speed: SpeedFacts }
  /** `name`: as `selectorOf` gives it. */
  | { readonly event: "default"; readonly name: string; readonly adapter: AdapterFacts };

export interface AdapterFacts extends AdapterSummary {
  readonly features: {
    /** Lanes at least and at most; null without subgroups. */
    readonly subgroups: readonly [number, number] | null;
    readonly f16: boolean;
    readonly timestamps: boolean;
    readonly packedDot: boolean;
  };
  readonly limits: {
    readonly bufferBytes: number;
    readonly bindingBytes: number;
    readonly bindingsPerKernel: number;
    readonly workgroupBytes: number;
    readonly workgroupLanes: number;
    readonly workgroupsPerDimension: number;
  };
  readonly memory: DeviceMemory;
}

/** Medians. The weight of the products: [outputs, columns], in bfloat16. */
export interface SpeedFacts {
  readonly outputs: number;
  readonly columns: number;
  /** Of the larger product. */
  readonly rows: number;
  /** From one buffer of the device to another; each byte counted once. */
  readonly copyBytesPerSecond: number;
  /** Of the weight that a product with one row reads. */
  readonly gemvBytesPerSecond: number;
  /** Of a product with `rows`: a multiplication and an addition are two. */
  readonly gemmFlops: number;
}

/** The child's side of `runProbe`. */
export async function answerProbe(request: ProbeRequest, say: (event: ProbeEvent) => void): Promise<void> {
  try {
    await answer(request, say);
  } catch (error) {
    say({ event: "error", message: messageOf(error), hint: error instanceof UserError ? error.hint : null });
  }
}

async function answer(request: ProbeRequest, say: (event: ProbeEvent) => void): Promise<void> {
  const warnings: string[] = [];
  const log = listening(warnings);
  switch (request.probe) {
    case "libraries":
      requireCalls();
      return say({ event: "libraries", glibc: glibcVersion(), ...cppRuntime() });
    case "runtime":
      say({ event: "step", what: "loaded the GPU runtime" });
      return say({ event: "dawn", origin: await loadRuntime() });
    case "loader": {
      requireCalls();
      if (request.withRuntime) await loadRuntime();
      const problem = loadProblem("libvulkan.so.1");
      if (problem !== undefined) throw new Error(problem);
      return say({ event: "loader", version: vulkanLoaderVersion(), path: libraryPath("libvulkan.so.1") });
    }
    case "driver":
      say({ event: "step", what: "was asked for its devices" });
      requireAddressSpace();
      if (request.withRuntime) await loadRuntime();
      say({ event: "devices", devices: vulkanDevices() });
      return;
    case "adapters":
      say({ event: "step", what: "was opened by the GPU runtime" });
      return say({ event: "adapters", adapters: await listAdapters(log), warnings });
    case "default": {
      say({ event: "step", what: "opened a device" });
      const device = await openDevice({ select: request.select, log, wanted: EVERYTHING });
      say({ event: "default", name: selectorOf(device.info), adapter: await factsOf(device) });
      return device.destroy();
    }
    case "adapter":
      return probeAdapter(request, log, say);
  }
}

/** What `--device` takes for just this adapter: of several with one name the second is `NAME#1`. */
export const selectorOf = ({ name, nameIndex }: Pick<AdapterSummary, "name" | "nameIndex">): string =>
  nameIndex ? `${name}#${nameIndex}` : name;

/** More than any device has: then it is opened with the most that it can do. */
const EVERYTHING = { bufferBytes: 2 ** 43, bindingBytes: 2 ** 43 };

async function probeAdapter(
  { name, quick }: Extract<ProbeRequest, { probe: "adapter" }>,
  log: Logger,
  say: (event: ProbeEvent) => void,
): Promise<void> {
  say({ event: "step", what: "was opened" });
  const device = await openDevice({ select: name, log, wanted: EVERYTHING });
  say({ event: "adapter", adapter: await factsOf(device) });

  const began = performance.now();
  const onStart = (kernel: string) => say({ event: "step", what: `ran the kernel ${kernel}` });
  for await (const result of runSelfTests(device, { onStart, quick })) say({ event: "kernel", result });
  say({ event: "tested", seconds: (performance.now() - began) / 1000 });

  if (!quick) {
    say({ event: "step", what: "was measured" });
    say({ event: "speed", speed: await measureSpeed(device) });
  }
  device.destroy();
}

async function factsOf(device: Device): Promise<AdapterFacts> {
  const { limits, info, hasSubgroups, hasF16, gpu } = device;
  const { subgroupMinSize, subgroupMaxSize, ...summary } = info;
  return {
    ...summary,
    features: {
      subgroups: hasSubgroups ? [subgroupMinSize, subgroupMaxSize] : null,
      f16: hasF16,
      timestamps: gpu.features.has("timestamp-query"),
      packedDot: await hasPackedDot(),
    },
    limits: {
      bufferBytes: device.maxBufferBytes,
      bindingBytes: device.maxBindingBytes,
      bindingsPerKernel: limits.maxStorageBuffersPerShaderStage,
      workgroupBytes: limits.maxComputeWorkgroupStorageSize,
      workgroupLanes: limits.maxComputeInvocationsPerWorkgroup,
      workgroupsPerDimension: limits.maxComputeWorkgroupsPerDimension,
    },
    memory: deviceMemory(info),
  };
}

/** Large enough for a GPU to be busy; on a CPU small enough to be done within a second. */
const SHAPES = { gpu: { outputs: 4096, columns: 4096, rows: 128 }, cpu: { outputs: 512, columns: 512, rows: 32 } };
const RUNS = 3;

async function measureSpeed(device: Device): Promise<SpeedFacts> {
  const copyBytesPerSecond = await measureCopy(device);
  const { outputs, columns, rows } = device.info.isSoftware ? SHAPES.cpu : SHAPES.gpu;
  const shape = { outputs, columns, encodings: ["bf16"], rows: [1, rows] } as const;
  const [gemv, gemm] = await Array.fromAsync(timeKernels(device, [shape], RUNS));
  return {
    outputs,
    columns,
    rows,
    copyBytesPerSecond,
    gemvBytesPerSecond: gemv!.gigabytesPerSecond * 1e9,
    gemmFlops: gemm!.gigaflopsPerSecond * 1e9,
  };
}

/** Collects what Dawn and the drivers say. */
function listening(warnings: string[]): Logger {
  const log = createLogger({ level: "error", format: "text", write: () => {} });
  const collect: Logger["debug"] = (event, fields) => {
    if (event === "native_warning" && typeof fields?.["text"] === "string") warnings.push(fields["text"]);
    else if (event === "adapter_unusable" || event === "bundled_driver_failed")
      warnings.push(String(fields?.["reason"]));
  };
  return { ...log, debug: collect, warn: collect };
}

/**
 * Throws where no library of the system can be called, which is not the library's fault: bun:ffi needs Bun's JIT, and under a
 * low `ulimit -v` there is none.
 */
function requireCalls(): void {
  try {
    if (hasLibc) libc();
  } catch (error) {
    if (!messageOf(error).includes("JIT")) return; // another C library than GNU's
    requireAddressSpace();
    throw new UserError(
      "no_device",
      "Bun has no JIT in this process, and without it no library of the system can be called (bun:ffi)",
      "unset BUN_JSC_useJIT; of a systemd unit leave MemoryDenyWriteExecute away",
      { cause: error },
    );
  }
}

async function loadRuntime(): Promise<DawnOrigin> {
  try {
    return await dawnOrigin();
  } catch (error) {
    requireCalls();
    throw error;
  }
}

function cppRuntime(): { libstdcxx: string | null; libstdcxxProblem: string | null } {
  const name = "libstdc++.so.6";
  const libstdcxx = libraryPath(name);
  return { libstdcxx, libstdcxxProblem: hasLibc && libstdcxx === null ? (loadProblem(name) ?? null) : null };
}

function glibcVersion(): string | null {
  if (process.platform !== "linux") return null;
  try {
    const { symbols } = dlopen("libc.so.6", { gnu_get_libc_version: { args: [], returns: "cstring" } });
    return String(symbols.gnu_get_libc_version());
  } catch {
    return null; // another C library than GNU's
  }
}

/** The file that the dynamic linker takes for a library, or null where it finds none. */
function libraryPath(name: string): string | null {
  if (process.platform !== "linux" || !preload(name)) return null;
  try {
    const stem = name.slice(0, name.indexOf(".so"));
    const maps = readFileSync("/proc/self/maps", "utf8");
    const [, path] = new RegExp(`(/\\S*/${stem.replaceAll("+", "\\+")}\\.so\\S*)$`, "m").exec(maps) ?? [];
    return path === undefined ? name : realpathSync(path);
  } catch {
    return name;
  }
}
