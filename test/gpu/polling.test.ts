import { beforeAll, expect, test } from "bun:test";
import { promisify } from "node:util";
import { createGpu } from "../../src/gpu/dawn.ts";
import { isDawnsPoll } from "../../src/gpu/polling.ts";

// Loading Dawn eases its polls (see src/gpu/polling.ts): they must be known for what they are, and all others left alone.

let gpu: GPU;
beforeAll(async () => void (gpu = await createGpu(["backend=null"])));

test("Dawn's polls are told from what others pass to setImmediate", async () => {
  const eased = globalThis.setImmediate;
  const passed: (() => void)[] = [];
  globalThis.setImmediate = ((callback: () => void) => {
    passed.push(callback);
    return eased(callback);
  }) as typeof setImmediate;
  try {
    const device = await (await gpu.requestAdapter())!.requestDevice();
    device.destroy();
  } finally {
    globalThis.setImmediate = eased;
  }
  expect(passed.length).toBeGreaterThan(0);
  expect(passed.every(isDawnsPoll)).toBe(true);

  const { resolve } = Promise.withResolvers<void>(); // native too
  expect(isDawnsPoll(resolve)).toBe(false);
  expect(isDawnsPoll(function () {})).toBe(false);
});

test("setImmediate hands its arguments on", async () => {
  const got = await new Promise((resolve) => setImmediate((...values: number[]) => resolve(values), 1, 2));
  expect(got).toEqual([1, 2]);
});

test("setImmediate runs callbacks of every kind before a timer, in their order", async () => {
  const order: string[] = [];
  const done = new Promise<void>((resolve) => setTimeout(resolve, 1));
  const bound = ((name: string) => order.push(name)).bind(undefined, "bound");
  setImmediate(() => order.push("arrow"));
  setImmediate(function () {
    order.push("function");
  });
  setImmediate(bound);
  await new Promise<void>((resolve) => setImmediate(resolve));
  order.push("resolve function");
  await done;
  expect(order).toEqual(["arrow", "function", "bound", "resolve function"]);
});

test("clearImmediate still cancels", async () => {
  let ran = false;
  clearImmediate(setImmediate(() => (ran = true)));
  await new Promise<void>((resolve) => setImmediate(resolve));
  expect(ran).toBe(false);
});

test("setImmediate keeps its promise version", async () => {
  expect(await promisify(setImmediate)("value")).toBe("value");
});
