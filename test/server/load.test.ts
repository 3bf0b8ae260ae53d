import { afterEach, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import { createLogger } from "../../src/base/log.ts";
import { serve } from "../../src/server/serve.ts";
import { errorOf, gate, post, startNode, type TinyNode, type TinyNodeOptions, until } from "./tiny-node.ts";

const running: TinyNode[] = [];
afterEach(async () => {
  await Promise.all(running.splice(0).map((node) => node.stop()));
});
async function start(options: Partial<TinyNodeOptions>): Promise<TinyNode> {
  const node = await startNode({ start: 0, end: 4, ...options });
  running.push(node);
  return node;
}
const ask = (node: TinyNode, headers?: Record<string, string>) => post(node.url, "a", "text/plain", headers);

test("calls run one after another, and all are answered", async () => {
  let inside = 0;
  let most = 0;
  const node = await start({
    gate: async () => {
      most = Math.max(most, ++inside);
      await Bun.sleep(1);
      inside--;
    },
  });
  const replies = await Promise.all(Array.from({ length: 30 }, () => ask(node)));
  expect(replies.map(({ status }) => status)).toEqual(Array(30).fill(200));
  expect(most).toBe(1);
});

test("one call more than may wait is refused with 429 and when to come back", async () => {
  const { wait, open } = gate();
  const node = await start({ gate: wait, limits: { maxWaiting: 3 } });
  const taken = Array.from({ length: 4 }, () => ask(node));
  await until(async () => {
    const reply = await ask(node, { "X-Meshnet-Deadline-Ms": "20" });
    if (reply.status !== 429) return false; // it found room before the others did, and gave it back
    expect(reply.headers.get("Retry-After")).toBe("1");
    expect(await errorOf(reply)).toMatchObject({ code: "no_room", message: expect.stringContaining("3") });
    return true;
  });
  open();
  expect((await Promise.all(taken)).map(({ status }) => status)).toEqual([200, 200, 200, 200]);
  expect((await ask(node)).status).toBe(200);
});

test("the work of a client that has gone while it waited is not run", async () => {
  const { wait, open } = gate();
  const node = await start({ gate: wait });
  const first = ask(node);
  await until(() => node.stage.calls === 1);
  const gone = new AbortController();
  const second = fetch(new URL("forward", node.url), {
    method: "POST",
    body: "b",
    headers: { "Content-Type": "text/plain" },
    signal: gone.signal,
  }).catch(() => "gone");
  await Bun.sleep(30);
  gone.abort();
  expect(await second).toBe("gone");
  await Bun.sleep(30);
  open();
  expect((await first).status).toBe(200);
  expect((await ask(node)).status).toBe(200);
  expect(node.stage.calls).toBe(2);
});

test("a node that all callers have hung up on stops at once, though their pass still runs", async () => {
  const { wait, open } = gate();
  const node = await startNode({ start: 0, end: 4, gate: wait });
  const gone = new AbortController();
  const headers = { "Content-Type": "text/plain" };
  const calls = ["a", "b", "c", "d"].map((body, i) =>
    fetch(new URL("forward", node.url), {
      method: "POST",
      body,
      headers: i % 2 === 0 ? headers : { ...headers, "X-Meshnet-Session": `s${i}`, "X-Meshnet-Step": "0" },
      signal: gone.signal,
    }).catch(() => "gone"),
  );
  await until(() => node.stage.calls === 1 && node.stage.cacheUse.sessions === 4);
  gone.abort();
  expect(await Promise.all(calls)).toEqual(Array(4).fill("gone"));
  await node.stop(); // the gate is closed still
  open();
});

test("a caller's deadline ends its waiting with 504, in the queue and on the device", async () => {
  const { wait, open } = gate();
  const node = await start({ gate: wait });
  const headers = { "X-Meshnet-Deadline-Ms": "20" };
  const replies = await Promise.all([ask(node, headers), ask(node, headers)]);
  for (const reply of replies) expect([reply.status, (await errorOf(reply)).code]).toEqual([504, "deadline"]);
  expect(node.stage.calls).toBe(1);
  open();
  expect((await ask(node)).status).toBe(200);
});

test("a node that is told to stop finishes what runs and what waits, and refuses the rest", async () => {
  const { wait, open } = gate();
  const node = await startNode({ start: 0, end: 4, gate: wait });
  const taken = [ask(node), ask(node)];
  await until(() => node.stage.calls === 1);
  await Bun.sleep(20);
  const stopped = node.stop();
  const late = await ask(node);
  expect([late.status, (await errorOf(late)).code, late.headers.get("Retry-After")]).toEqual([503, "draining", "1"]);
  expect((await fetch(new URL("health/ready", node.url))).status).toBe(503);
  expect((await fetch(new URL("health/live", node.url))).status).toBe(200);
  open();
  for (const reply of await Promise.all(taken))
    expect([reply.status, await reply.json()]).toEqual([200, expect.objectContaining({ finish: [null] })]);
  await stopped;
  await expect(ask(node)).rejects.toThrow();
});

test("a node whose device is gone is alive and not ready, and is ready again when the device is", async () => {
  let isGone = true;
  const node = await start({
    gate: () => (isGone ? Promise.reject(new UserError("device_lost", "gone", "restart")) : undefined),
  });
  const get = async (path: string) => (await fetch(new URL(path, node.url))).status;
  expect([await get("health/live"), await get("health/ready")]).toEqual([200, 503]);
  isGone = false;
  expect(await get("health/ready")).toBe(200);
});

test("a port that is taken is named, with a way out", async () => {
  const node = await start({});
  const again = () => serve(node.app, { hostname: "127.0.0.1", port: node.server.port });
  expect(again).toThrow(
    expect.objectContaining({ code: "port_in_use", message: expect.stringContaining(String(node.server.port)) }),
  );
});

test("no prompt goes into the log, not even of a call that meets a bug", async () => {
  const lines: string[] = [];
  const log = createLogger({ level: "debug", format: "json", write: (line) => lines.push(line) });
  const node = await start({ log, gate: () => Promise.reject(new Error("a bug")) });
  const secret = "my secret";
  const reply = await post(node.url, secret, "text/plain");
  await post(node.url, `{"prompt": ${secret}}`, "application/json");
  await post(node.url, JSON.stringify({ [secret]: 1 }), "application/json");
  expect([reply.status, (await errorOf(reply)).code]).toEqual([500, "internal"]);
  expect(lines.length).toBeGreaterThanOrEqual(3);
  expect(lines.join("\n")).not.toContain("secret");
  expect(lines.join("\n")).toContain("a bug");
});
