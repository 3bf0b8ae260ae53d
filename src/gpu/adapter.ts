import { UserError, messageOf } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { withBundledDriver } from "./bundled-driver.ts";
import { captureStderr } from "./capture-stderr.ts";
import { createGpu } from "./dawn.ts";
import { putFirst, reorderDevices } from "./device-order.ts";

export interface AdapterSummary {
  /** The device's name in its driver, e.g. `NVIDIA GeForce RTX 4090` or `llvmpipe (LLVM 15.0.6, 256 bits)`. */
  name: string;
  /** Which of several adapters with this name, from 0 on: two equal GPUs. */
  nameIndex: number;
  /** The driver's own description, with its version. */
  description: string;
  vendor: string;
  architecture: string;
  /** Computes on the CPU. */
  isSoftware: boolean;
  /** Runs on the SwiftShader that the binary carries, no installed driver. */
  bundledDriver: boolean;
}

export interface FoundAdapter {
  summary: AdapterSummary;
  /** Good for one requestDevice. */
  adapter: GPUAdapter;
}

/**
 * The adapter that `--device` means. `auto`: a GPU, else an installed software driver, else the bundled one; `cpu`:
 * the same without GPUs; anything else: the first whose name contains it, whatever the case, and with `#N` behind it the
 * one with this index among adapters of the same name. Throws UserError "no_device" with the adapters there are.
 */
export async function findAdapter(select: string, log: Logger): Promise<FoundAdapter> {
  if (partsOf(select).nameIndex > 0 && !(await reorderDevices())) refuseIndex(select);
  const installed = await installedAdapters(log);
  const bundled = choose(installed, select) ? [] : await bundledAdapters(log); // takes 30 ms, for nothing where a GPU is
  const all = [...installed, ...bundled];
  return choose(all, select) ?? refuse(select, all);
}

export async function allAdapters(log: Logger): Promise<FoundAdapter[]> {
  return [...(await installedAdapters(log)), ...(await bundledAdapters(log))];
}

function choose(adapters: FoundAdapter[], select: string): FoundAdapter | undefined {
  switch (select) {
    case "auto":
      return adapters.find(({ summary }) => !summary.isSoftware) ?? adapters[0];
    case "cpu":
      return adapters.find(({ summary }) => summary.isSoftware);
    default: {
      const { name, nameIndex } = partsOf(select);
      return adapters.find(
        ({ summary }) => summary.nameIndex === nameIndex && summary.name.toLowerCase().includes(name.toLowerCase()),
      );
    }
  }
}

/** `GeForce#1` is the second of the adapters whose name has GeForce in it and is the same. */
function partsOf(select: string): { name: string; nameIndex: number } {
  const [, name = select, index = "0"] = /^(.+)#(\d+)$/.exec(select) ?? [];
  return { name, nameIndex: Number(index) };
}

const installedAdapters = (log: Logger): Promise<FoundAdapter[]> => adaptersOf(log, false);

async function bundledAdapters(log: Logger): Promise<FoundAdapter[]> {
  try {
    return (await withBundledDriver(() => adaptersOf(log, true))) ?? [];
  } catch (error) {
    log.warn("bundled_driver_failed", { reason: messageOf(error) });
    return [];
  }
}

/** Those of the drivers that the Vulkan loader finds now, discrete GPUs first, then integrated ones, then software. */
async function adaptersOf(log: Logger, bundledDriver: boolean): Promise<FoundAdapter[]> {
  const found: FoundAdapter[] = [];
  const seen = new Map<string, number>();
  for (const name of await adapterNames(log)) {
    const nameIndex = seen.get(name) ?? 0;
    seen.set(name, nameIndex + 1);
    putFirst(name, nameIndex); // without effect where nobody asked for an index: then the first is had each time
    const adapter = await requestAdapter(name, log);
    if (!adapter) continue;
    const { description, vendor, architecture, isFallbackAdapter: isSoftware } = adapter.info;
    found.push({ summary: { name, nameIndex, description, vendor, architecture, isSoftware, bundledDriver }, adapter });
  }
  return found;
}

/**
 * Asking for an adapter that cannot exist is the one way to hear of all: Dawn's refusal lists them as
 * ` * backend: 'vulkan', name: '…'`. Dawn selects by name: of two equal GPUs the first (see `device-order.ts`).
 */
async function adapterNames(log: Logger): Promise<string[]> {
  const gpu = await createGpu(["adapter=\u0001"]);
  const refusal = await captureStderr(log, () => gpu.requestAdapter(PREFERENCE).then(() => "", messageOf));
  return Array.from(refusal.matchAll(/^ \* backend: '\w+', name: '(.*)'$/gm), (match) => match[1]!);
}

async function requestAdapter(name: string, log: Logger): Promise<GPUAdapter | null> {
  const gpu = await createGpu([`adapter=${name}`]);
  return captureStderr(log, () => gpu.requestAdapter(PREFERENCE)).catch((error: unknown) => {
    log.debug("adapter_unusable", { name, reason: messageOf(error) });
    return null;
  });
}

/** Dawn sorts by it: discrete GPUs first. */
const PREFERENCE: GPURequestAdapterOptions = { powerPreference: "high-performance" };

function refuse(select: string, adapters: FoundAdapter[]): never {
  if (adapters.length === 0)
    throw new UserError(
      "no_device",
      "no device was found, neither a GPU nor a software one",
      "install a Vulkan driver: your GPU maker's, or Mesa 23.1 or newer, which also computes on the CPU (mesa-vulkan-drivers)",
    );
  const names = adapters
    .map(({ summary: { name, nameIndex } }) => `"${name}${nameIndex ? `#${nameIndex}` : ""}"`)
    .join(", ");
  throw new UserError(
    "no_device",
    select === "cpu"
      ? `no device computes on the CPU; there is ${names}`
      : `no device is named "${select}"; there is ${names}`,
    "pass --device auto, or a part of one of these names",
  );
}

function refuseIndex(select: string): never {
  throw new UserError(
    "no_device",
    `"${select}" asks for one of several devices with the same name, and that is possible only with a Vulkan driver on Linux`,
    "leave the # and the number away for the first one",
  );
}
