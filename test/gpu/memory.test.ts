import { describe, expect, test } from "bun:test";
import { silentLogger } from "../../src/base/log.ts";
import { listAdapters } from "../../src/gpu/device.ts";
import { deviceMemory, type MemorySources } from "../../src/gpu/memory.ts";
import { type VulkanDevice, type VulkanHeap, vulkanDevices } from "../../src/gpu/vulkan-memory.ts";

const GIB = 2 ** 30;
const host = () => ({ totalBytes: 32 * GIB, availableBytes: 20 * GIB, boundBy: "the machine" });

const card = (name: string, type: VulkanDevice["type"], ...heaps: VulkanHeap[]): VulkanDevice => ({
  name,
  type,
  vendorId: 1,
  deviceId: 2,
  apiVersion: "1.3.0",
  driver: { name: "", info: "" },
  uuid: "",
  heaps,
});
const heap = (sizeBytes: number, budget?: [budgetBytes: number, usageBytes: number], isDeviceLocal = true) => ({
  sizeBytes,
  isDeviceLocal,
  ...(budget && { budget: { budgetBytes: budget[0], usageBytes: budget[1] } }),
});
const sources = (devices: VulkanDevice[], platform: NodeJS.Platform = "linux"): MemorySources => ({
  platform,
  host,
  vulkan: () => devices,
});

describe("the memory of a GPU is", () => {
  const gpu = { name: "GPU", isSoftware: false };

  test("what the driver's budget leaves of the largest heap of its own", () => {
    const devices = [
      card(
        "GPU",
        "discrete",
        heap(256 * 2 ** 20, [200 * 2 ** 20, 0]), // the window through which the CPU writes
        heap(24 * GIB, [22 * GIB, 2 * GIB]),
        heap(48 * GIB, [48 * GIB, 0], false),
      ),
    ];
    expect(deviceMemory(gpu, sources(devices))).toMatchObject({
      totalBytes: 24 * GIB,
      availableBytes: 20 * GIB,
      isEstimate: false,
    });
  });

  test("an estimate where the driver has no budget", () => {
    const memory = deviceMemory(gpu, sources([card("GPU", "discrete", heap(10 * GIB))]));
    expect(memory).toMatchObject({ totalBytes: 10 * GIB, availableBytes: 9 * GIB, isEstimate: true });
  });

  test("no more than the machine can give, where it shares the machine's", () => {
    const memory = deviceMemory(gpu, sources([card("GPU", "integrated", heap(31 * GIB, [28 * GIB, 0]))]));
    expect(memory).toMatchObject({ availableBytes: 20 * GIB, source: expect.stringContaining("shares") });
  });

  test("that of the device of its name, and of equal names the one with its index", () => {
    const devices = [
      card("other", "discrete", heap(1 * GIB, [1 * GIB, 0])),
      card("GPU", "discrete", heap(2 * GIB, [2 * GIB, 0])),
      card("GPU", "discrete", heap(4 * GIB, [4 * GIB, 0])),
    ];
    const available = [0, 1].map((nameIndex) => deviceMemory({ ...gpu, nameIndex }, sources(devices)).availableBytes);
    expect(available).toEqual([2 * GIB, 4 * GIB]);
  });

  test("unknown where there is no such device and where Vulkan cannot be asked", () => {
    expect(deviceMemory(gpu, sources([]))).toMatchObject({ totalBytes: null, availableBytes: null, isEstimate: true });
    const vulkan = () => vulkanDevices("libthere-is-no-such-loader.so.1");
    const memory = deviceMemory(gpu, { ...sources([]), vulkan });
    expect(memory).toMatchObject({ availableBytes: null, source: expect.stringContaining("there-is-no-such-loader") });
  });

  test("a share of the machine's on a Mac, as an estimate", () => {
    expect(deviceMemory(gpu, sources([], "darwin"))).toMatchObject({
      availableBytes: Math.floor((64 * GIB) / 3),
      isEstimate: true,
    });
  });
});

test("the memory of a device that computes on the CPU is the machine's, whatever heaps its driver names", () => {
  const devices = [card("CPU", "cpu", heap(2 * GIB))];
  expect(deviceMemory({ name: "CPU", isSoftware: true }, sources(devices))).toMatchObject({
    totalBytes: 32 * GIB,
    availableBytes: 20 * GIB,
    isEstimate: false,
  });
});

const installed = (await listAdapters(silentLogger)).filter(({ bundledDriver }) => !bundledDriver);
const hasVulkan = process.platform === "linux" && installed.length > 0;

test.skipIf(!hasVulkan)("Vulkan names every installed adapter as Dawn does, with a heap of its own", () => {
  const devices = vulkanDevices();
  expect(devices.map(({ name }) => name).toSorted()).toEqual(installed.map(({ name }) => name).toSorted());
  for (const { heaps } of devices) {
    const local = heaps.filter(({ isDeviceLocal }) => isDeviceLocal);
    expect(local.length).toBeGreaterThan(0);
    for (const { sizeBytes, budget } of local) {
      expect(sizeBytes).toBeWithin(2 ** 20, 2 ** 45);
      if (budget) expect(budget.budgetBytes).toBeWithin(1, sizeBytes + 1);
    }
  }
});
