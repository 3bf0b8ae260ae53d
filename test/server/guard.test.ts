import { afterAll, beforeAll, expect, test } from "bun:test";
import { connect } from "node:net";
import { errorOf, startNode, type TinyNode } from "./tiny-node.ts";

let node: TinyNode;
beforeAll(async () => {
  const allowed = { hosts: ["my-node", "192.168.1.5", "fe80::1"], origins: ["https://app.example"] };
  node = await startNode({ start: 0, end: 4, allowed });
});
afterAll(() => node.stop());

const call = (headers: Record<string, string>, path = "forward") =>
  fetch(new URL(path, node.url), { method: "POST", body: "a", headers: { "Content-Type": "text/plain", ...headers } });

test.each([
  "localhost",
  "LOCALHOST:80",
  "127.0.0.1:8000",
  "127.8.8.8",
  "[::1]:9",
  "my-node",
  "my-node:8000",
  "My-Node.",
  "192.168.1.5:1",
  "[fe80::1]:7",
])("a call addressed to %s is taken", async (host) => {
  expect((await call({ Host: host })).status).toBe(200);
});

test.each([
  "evil.example",
  "localhost.evil.example",
  "127.0.0.1.evil.example",
  "192.168.1.6",
  "user@localhost",
  "[::2]",
  "localhost:x",
])("a call addressed to %s is refused on every route, as a page of a rebound name would make it", async (host) => {
  for (const path of ["forward", "info", "health/live", "nothing"]) {
    const reply = await call({ Host: host }, path);
    expect([reply.status, (await errorOf(reply)).code]).toEqual([403, "forbidden_host"]);
  }
  expect(node.stage.calls).toBeLessThan(20);
});

test("a call of HTTP/1.0 that names no host is refused", async () => {
  const reply = await new Promise<string>((resolve) => {
    let text = "";
    const socket = connect(node.server.port, "127.0.0.1", () => socket.write("GET /info HTTP/1.0\r\n\r\n"));
    socket.on("data", (data) => (text += data));
    socket.on("close", () => resolve(text));
  });
  expect(reply).toContain("403");
  expect(reply).toContain("forbidden_host");
});

test("a web page's call is refused unless its origin is allowed", async () => {
  for (const origin of ["https://evil.example", "null", "http://localhost:3000", "https://app.example.evil"]) {
    const before = node.stage.calls;
    const reply = await call({ Origin: origin });
    expect([reply.status, (await errorOf(reply)).code, node.stage.calls]).toEqual([403, "forbidden_origin", before]);
  }
  expect((await call({ Origin: "https://app.example" })).status).toBe(200);
});
