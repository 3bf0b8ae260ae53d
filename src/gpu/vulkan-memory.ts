import { dlopen, type Pointer, ptr } from "bun:ffi";
import { vulkanLoader } from "./device-order.ts";

export interface VulkanHeap {
  readonly sizeBytes: number;
  readonly isDeviceLocal: boolean;
  /** What this process may take of it in all, and what it has taken; where the driver tells (VK_EXT_memory_budget). */
  readonly budget?: { readonly budgetBytes: number; readonly usageBytes: number };
}

/** A device as Vulkan has it. Dawn shows no ids of a device, only the name. */
export interface VulkanDevice {
  readonly name: string;
  readonly type: (typeof TYPES)[number];
  readonly vendorId: number;
  readonly deviceId: number;
  readonly apiVersion: string;
  /** The driver's name and what it says of its version ("Mesa 25.0.7-2 (LLVM 15.0.6)"); empty where it says nothing. */
  readonly driver: { readonly name: string; readonly info: string };
  /** Of the device and its driver, in hexadecimal. */
  readonly uuid: string;
  readonly heaps: readonly VulkanHeap[];
}

/**
 * Every device of the installed Vulkan drivers with its memory, in the order in which Vulkan has them. It asks the loader
 * itself, by an instance of its own, and makes no device; 20-45 ms.
 * Throws an Error where there is no loader or no driver.
 */
export function vulkanDevices(loader = loaderName()): VulkanDevice[] {
  const vk = open(loader);
  const instance = createInstance(vk);
  try {
    return physicalDevices(vk, instance).map((device) => describe(vk, device));
  } finally {
    vk.vkDestroyInstance(instance, null);
  }
}

/** The version of the Vulkan loader. Throws an Error where there is none. */
export function vulkanLoaderVersion(loader = loaderName()): string {
  const version = new Uint32Array(1);
  check("vkEnumerateInstanceVersion", open(loader).vkEnumerateInstanceVersion(ptr(version)));
  return versionText(version[0]!);
}

const versionText = (version: number): string => `${version >>> 22}.${(version >>> 12) & 1023}.${version & 4095}`;

/** Never closed: drivers do not count on being unloaded. */
function open(loader: string): Vulkan {
  const vk = opened.get(loader) ?? dlopen(loader, SYMBOLS).symbols;
  opened.set(loader, vk);
  return vk;
}

const opened = new Map<string, Vulkan>();

const SYMBOLS = {
  vkEnumerateInstanceVersion: { args: ["ptr"], returns: "i32" },
  vkCreateInstance: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
  vkDestroyInstance: { args: ["ptr", "ptr"], returns: "void" },
  vkEnumeratePhysicalDevices: { args: ["ptr", "ptr", "ptr"], returns: "i32" },
  vkGetPhysicalDeviceProperties: { args: ["ptr", "ptr"], returns: "void" },
  vkGetPhysicalDeviceProperties2: { args: ["ptr", "ptr"], returns: "void" },
  vkGetPhysicalDeviceMemoryProperties2: { args: ["ptr", "ptr"], returns: "void" },
  vkEnumerateDeviceExtensionProperties: { args: ["ptr", "ptr", "ptr", "ptr"], returns: "i32" },
} as const;

type Vulkan = ReturnType<typeof dlopen<typeof SYMBOLS>>["symbols"];

function loaderName(): string {
  switch (process.platform) {
    case "win32":
      return "vulkan-1.dll";
    case "darwin":
      return "libvulkan.dylib";
    default:
      return vulkanLoader();
  }
}

// The offsets below are those of the C structs in vulkan_core.h on a 64-bit machine, which are part of Vulkan's ABI.

const VERSION_1_1 = (1 << 22) | (1 << 12);
const STRUCTURE = {
  instanceCreateInfo: 1,
  properties2: 1_000_059_001,
  memoryProperties2: 1_000_059_006,
  driverProperties: 1_000_196_000,
  memoryBudget: 1_000_237_000,
};
const TYPES = ["other", "integrated", "discrete", "virtual", "cpu"] as const;
const DEVICE_LOCAL = 1;
const BUDGET_EXTENSION = "VK_EXT_memory_budget";

function createInstance(vk: Vulkan): Pointer {
  const application = new DataView(new ArrayBuffer(48));
  application.setUint32(44, VERSION_1_1, true); // the first with vkGetPhysicalDeviceMemoryProperties2
  const info = new DataView(new ArrayBuffer(64));
  info.setUint32(0, STRUCTURE.instanceCreateInfo, true);
  info.setBigUint64(24, BigInt(ptr(application)), true);
  const instance = new BigUint64Array(1);
  check("vkCreateInstance", vk.vkCreateInstance(ptr(info), null, ptr(instance)));
  keepAlive(application);
  return Number(instance[0]) as Pointer;
}

function physicalDevices(vk: Vulkan, instance: Pointer): Pointer[] {
  const count = new Uint32Array(1);
  check("vkEnumeratePhysicalDevices", vk.vkEnumeratePhysicalDevices(instance, ptr(count), null));
  if (count[0] === 0) return [];
  const devices = new BigUint64Array(count[0]!);
  check("vkEnumeratePhysicalDevices", vk.vkEnumeratePhysicalDevices(instance, ptr(count), ptr(devices)));
  return Array.from(devices.subarray(0, count[0]), (device) => Number(device) as Pointer);
}

function describe(vk: Vulkan, device: Pointer): VulkanDevice {
  const properties = new DataView(new ArrayBuffer(1024)); // 824 bytes, whichever limits a newer version appends
  vk.vkGetPhysicalDeviceProperties(device, ptr(properties));
  return {
    name: textAt(properties, 20, 256),
    type: TYPES[properties.getUint32(16, true)] ?? "other",
    vendorId: properties.getUint32(8, true),
    deviceId: properties.getUint32(12, true),
    apiVersion: versionText(properties.getUint32(0, true)),
    driver: driverOf(vk, device),
    uuid: Buffer.from(properties.buffer, 276, 16).toString("hex"),
    heaps: heapsOf(vk, device, extensionsOf(vk, device).includes(BUDGET_EXTENSION)),
  };
}

/** VkPhysicalDeviceDriverProperties (Vulkan 1.2 or VK_KHR_driver_properties): a driver without it leaves it empty. */
function driverOf(vk: Vulkan, device: Pointer): VulkanDevice["driver"] {
  const driver = new DataView(new ArrayBuffer(536));
  driver.setUint32(0, STRUCTURE.driverProperties, true);
  const properties = new DataView(new ArrayBuffer(1024));
  properties.setUint32(0, STRUCTURE.properties2, true);
  properties.setBigUint64(8, BigInt(ptr(driver)), true);
  vk.vkGetPhysicalDeviceProperties2(device, ptr(properties));
  return { name: textAt(driver, 20, 256), info: textAt(driver, 276, 256) };
}

function extensionsOf(vk: Vulkan, device: Pointer): string[] {
  const count = new Uint32Array(1);
  const ask = "vkEnumerateDeviceExtensionProperties";
  check(ask, vk.vkEnumerateDeviceExtensionProperties(device, null, ptr(count), null));
  if (count[0] === 0) return [];
  const list = new DataView(new ArrayBuffer(260 * count[0]!));
  check(ask, vk.vkEnumerateDeviceExtensionProperties(device, null, ptr(count), ptr(list)));
  return Array.from({ length: count[0]! }, (_, index) => textAt(list, index * 260, 256));
}

/** VkPhysicalDeviceMemoryProperties2 with, where `hasBudget`, VkPhysicalDeviceMemoryBudgetPropertiesEXT in its chain. */
function heapsOf(vk: Vulkan, device: Pointer, hasBudget: boolean): VulkanHeap[] {
  const budget = new DataView(new ArrayBuffer(272));
  budget.setUint32(0, STRUCTURE.memoryBudget, true);
  const memory = new DataView(new ArrayBuffer(544));
  memory.setUint32(0, STRUCTURE.memoryProperties2, true);
  if (hasBudget) memory.setBigUint64(8, BigInt(ptr(budget)), true);
  vk.vkGetPhysicalDeviceMemoryProperties2(device, ptr(memory));
  const bytesAt = (view: DataView, offset: number) => Number(view.getBigUint64(offset, true));
  return Array.from({ length: memory.getUint32(276, true) }, (_, heap): VulkanHeap => {
    const own = {
      sizeBytes: bytesAt(memory, 280 + 16 * heap),
      isDeviceLocal: (memory.getUint32(288 + 16 * heap, true) & DEVICE_LOCAL) !== 0,
    };
    if (!hasBudget) return own;
    return {
      ...own,
      budget: { budgetBytes: bytesAt(budget, 16 + 8 * heap), usageBytes: bytesAt(budget, 144 + 8 * heap) },
    };
  });
}

function textAt(view: DataView, offset: number, length: number): string {
  const bytes = new Uint8Array(view.buffer, offset, length);
  const end = bytes.indexOf(0);
  return new TextDecoder().decode(bytes.subarray(0, end < 0 ? length : end));
}

function check(call: string, result: number): void {
  // VK_INCOMPLETE (5): a device appeared between the two questions, and the list is good without it.
  if (result !== 0 && result !== 5) throw new Error(`${call} failed with VkResult ${result}`);
}

/** Native code holds a pointer into it until here. */
function keepAlive(..._views: ArrayBufferView[]): void {}
