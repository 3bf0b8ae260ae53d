import { afterEach, expect, test } from "bun:test";
import { PROTOCOL_VERSION } from "../../src/protocol/headers.ts";
import type { MemoryInfo } from "../../src/protocol/info.ts";
import { ASSUMED, describeMachines } from "../../src/server/machines.ts";
import { startNode } from "./tiny-node.ts";

const running: { stop(): unknown }[] = [];
afterEach(async () => {
  await Promise.all(running.splice(0).map((one) => one.stop()));
});

const describeThem = (...urls: string[]) =>
  describeMachines(
    urls.map((url) => ({ url })),
    { ...ASSUMED, linkSource: "assumed" },
  );

/** The URL of a node that says this of its memory. */
const nodeWith = (memory: MemoryInfo): Promise<string> => nodeThatSays({ memory });

/** The URL of a node that has this in its `/info`. */
async function nodeThatSays(said: object): Promise<string> {
  const node = await startNode({ start: 0, end: 4 });
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    async fetch(request) {
      const { pathname } = new URL(request.url);
      const { method } = request;
      const body = method === "POST" ? await request.arrayBuffer() : undefined;
      const headers = new Headers(request.headers);
      headers.delete("Host");
      const reply = await fetch(new URL(pathname, node.url), { method, headers, body });
      return pathname === "/info" ? Response.json({ ...((await reply.json()) as object), ...said }) : reply;
    },
  });
  running.push(node, { stop: () => server.stop(true) });
  return server.url.href;
}

test.each<[string, MemoryInfo, { memoryBytes: number | null; limitBytes: number | null }]>([
  ["no limit", { planned: 9, allocated: 10, available: 90 }, { memoryBytes: 100, limitBytes: null }],
  [
    "a limit beside what the device has",
    { planned: 9, allocated: 10, available: 20, limit: 30, device_available: 90 },
    { memoryBytes: 100, limitBytes: 30 },
  ],
  [
    "a limit, and a device of which nobody knows",
    { planned: 9, allocated: 10, available: 20, limit: 30, device_available: null },
    { memoryBytes: null, limitBytes: 30 },
  ],
  ["a limit of an older meshnet", { planned: 9, allocated: 10, available: 20 }, { memoryBytes: 30, limitBytes: null }],
])("a running node with %s is counted as it counts itself", async (_, memory, counted) => {
  expect(await describeThem(await nodeWith(memory))).toMatchObject([counted]);
});

test("a node of which nobody knows the memory has to be told it", async () => {
  const url = await nodeWith({ planned: 9, allocated: 10, available: null });
  await expect(describeThem(url)).rejects.toMatchObject({ code: "bad_usage", hint: expect.stringContaining("=24GiB") });
});

test.each([
  ["memory.available", { memory: { planned: 9, allocated: 10, available: -6 } }, "available -6"],
  ["no number", { memory: { planned: 9, allocated: 10, available: "lots" } }, 'available "lots"'],
  ["memory.allocated", { memory: { planned: 9, allocated: -10, available: 90 } }, "allocated -10"],
  ["a limit", { memory: { planned: 9, allocated: 10, available: 90, limit: 0.5 } }, "limit 0.5"],
  ["weights", { weight_bytes_per_token: -1 }, "weight_bytes_per_token -1"],
])("a node that tells nonsense of bytes is refused, unless it is not asked: %s", async (_, said, what) => {
  const url = await nodeThatSays(said);
  await expect(describeThem(url)).rejects.toMatchObject({
    code: "next_nonsense",
    message: expect.stringContaining(what),
    hint: expect.stringContaining(`${url}=24GiB`),
  });
  const spec = { url, memoryBytes: 100, bytesPerSecond: 1e9 };
  expect(await describeMachines([spec], { ...ASSUMED, linkSource: "assumed" })).toMatchObject([{ memoryBytes: 100 }]);
});

test("a node of another protocol version is refused, with both and what to do", async () => {
  const url = await nodeThatSays({ v: PROTOCOL_VERSION + 1 });
  await expect(describeThem(url)).rejects.toMatchObject({
    code: "not_supported",
    message: `the node ${url} speaks protocol version ${PROTOCOL_VERSION + 1}, and this meshnet ${PROTOCOL_VERSION}`,
    hint: expect.stringContaining("run the same version of meshnet on both"),
  });
});

test("one node under two names is refused: its memory is there once", async () => {
  const url = await nodeWith({ planned: 9, allocated: 10, available: 90 });
  const other = url.replace("127.0.0.1", "localhost");
  await expect(describeThem(url, other)).rejects.toMatchObject({
    code: "bad_usage",
    message: expect.stringContaining(other),
  });
});
