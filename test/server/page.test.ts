import { afterAll, beforeAll, expect, test } from "bun:test";
import { page } from "../../src/ui/page.ts";
import { errorOf, startNode, type TinyNode } from "./tiny-node.ts";

let node: TinyNode;
beforeAll(async () => {
  node = await startNode({ start: 0, end: 4, page, allowed: { hosts: ["my-node"], origins: ["https://app.example"] } });
});
afterAll(() => node.stop());

const call = (headers: Record<string, string>) =>
  fetch(new URL("forward", node.url), {
    method: "POST",
    body: "a",
    headers: { "Content-Type": "text/plain", ...headers },
  });

test.each([
  ["http://localhost:8001", "localhost:8001"],
  ["http://127.0.0.1:8001", "127.0.0.1:8001"],
  ["http://[::1]:8001", "[::1]:8001"],
  ["http://my-node:8001", "My-Node:8001"],
  ["http://my-node", "my-node:80"], // browsers leave a scheme's own port away
  ["https://my-node", "my-node"], // a proxy has the encryption
])("a page of %s may call the same host (%s)", async (origin, host) => {
  expect((await call({ Origin: origin, Host: host })).status).toBe(200);
  expect((await call({ Origin: origin, Host: host, "Sec-Fetch-Site": "same-origin" })).status).toBe(200);
});

test.each([
  ["another port", "http://localhost:3000", "localhost:8001", "forbidden_origin"],
  ["another name of this machine", "http://localhost:8001", "127.0.0.1:8001", "forbidden_origin"],
  ["a name that begins the same", "http://my-node.evil.example", "my-node", "forbidden_origin"],
  ["no origin at all, such as a file", "null", "localhost:8001", "forbidden_origin"],
  ["a name that was pointed here", "http://evil.example:8001", "evil.example:8001", "forbidden_host"],
  ["another scheme", "ftp://my-node", "my-node", "forbidden_origin"],
])("a page of %s may not", async (_, origin, host, code) => {
  const before = node.stage.calls;
  const reply = await call({ Origin: origin, Host: host });
  expect([reply.status, (await errorOf(reply)).code, node.stage.calls]).toEqual([403, code, before]);
});

test("a page of the same host without encryption may not call the one with it, as browsers tell", async () => {
  const reply = await call({ Origin: "http://my-node", Host: "my-node", "Sec-Fetch-Site": "cross-site" });
  expect([reply.status, (await errorOf(reply)).message]).toEqual([403, expect.stringContaining("its own")]);
});

test("the page has its files and no others, and takes GET alone", async () => {
  for (const path of Object.keys(page)) {
    const reply = await fetch(new URL(path, node.url));
    expect([reply.status, reply.headers.get("Content-Security-Policy")]).toEqual([200, expect.any(String)]);
    const { length } = await reply.bytes();
    const head = await fetch(new URL(path, node.url), { method: "HEAD" });
    expect([head.status, Number(head.headers.get("Content-Length"))]).toEqual([200, length]);
  }
  expect((await fetch(new URL("ui/main.ts", node.url))).status).toBe(404);
  expect((await fetch(node.url, { method: "POST" })).status).toBe(405);
});
