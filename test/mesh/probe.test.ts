import { afterEach, describe, expect, test } from "bun:test";
import type { UserError } from "../../src/base/errors.ts";
import { probePeer } from "../../src/mesh/probe.ts";
import type { RemoteError } from "../../src/protocol/error-reply.ts";
import { MAX_PROBE_BYTES } from "../../src/protocol/probe.ts";
import { errorOf, startNode, type TinyNodeOptions } from "../server/tiny-node.ts";

const running: { stop(): Promise<void> | void }[] = [];
afterEach(async () => {
  await Promise.all(running.splice(0).map((one) => one.stop()));
});

async function start(options: TinyNodeOptions) {
  const node = await startNode(options);
  running.push(node);
  return node;
}

/** In front of a node, with a way of its own to answer. */
function inFront(url: string, answer: (request: Request, path: string) => Promise<Response | undefined>): string {
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    async fetch(request) {
      const path = new URL(request.url).pathname;
      const own = await answer(request, path);
      if (own) return own;
      const headers = new Headers(request.headers);
      headers.delete("Host");
      return fetch(new URL(path, url), { method: request.method, headers, body: request.body });
    },
  });
  running.push({ stop: () => server.stop(true) });
  return server.url.href;
}

describe("a probe of a node", () => {
  test("tells what it is, that it is ready, and how fast it and the way to it are", async () => {
    const tail = await start({ start: 2, end: 4 });
    const head = await start({ start: 0, end: 2, next: tail.url });
    for (const { node, layers } of [
      { node: head, layers: [0, 2] },
      { node: tail, layers: [2, 4] },
    ]) {
      const calls = node.stage.calls;
      const report = await probePeer(node.url);
      expect(report).toMatchObject({ url: node.url, notReady: null, problems: [] });
      expect([report.info.start, report.info.end]).toEqual(layers);
      expect(report.roundTripSeconds).toBeWithin(1e-6, 1);
      expect(report.uploadBytesPerSecond).toBeGreaterThan(1e6);
      expect(report.tokenSeconds).toBeWithin(0, 1);
      expect(node.stage.calls).toBeGreaterThan(calls);
    }
  });

  test("measures a node's time for a token by that node's own clock, and not the rest of the chain", async () => {
    const tail = await start({ start: 2, end: 4, gate: () => Bun.sleep(400) });
    const head = await start({ start: 0, end: 2, next: tail.url, gate: () => Bun.sleep(20) });
    const url = inFront(head.url, async (_, path) => void (path === "/forward" && (await Bun.sleep(300))));
    const { tokenSeconds } = await probePeer(url);
    expect(tokenSeconds).toBeWithin(0.019, 0.25);
  });

  test("measures the way there and back, and what goes through it", async () => {
    const node = await start({ start: 0, end: 4 });
    const bytesPerSecond = 20e6;
    const url = inFront(node.url, async (request, path) => {
      const bytes = (await request.clone().arrayBuffer()).byteLength;
      await Bun.sleep(30 + (path === "/probe" ? (bytes / bytesPerSecond) * 1000 : 0));
      return undefined;
    });
    const report = await probePeer(url);
    expect(report.roundTripSeconds).toBeWithin(0.029, 0.25);
    expect(report.uploadBytesPerSecond! / bytesPerSecond).toBeWithin(0.1, 1.3);
  });

  test("says in the node's own words why it takes no calls", async () => {
    const head = await start({ start: 0, end: 2, next: "http://127.0.0.1:9", eager: true });
    expect((await probePeer(head.url)).notReady).toContain("http://127.0.0.1:9");
  });

  test("says what could not be measured, and tells the rest", async () => {
    const node = await start({ start: 0, end: 4 });
    const url = inFront(node.url, async (_, path) =>
      path === "/probe" ? new Response("no such thing", { status: 404 }) : undefined,
    );
    const report = await probePeer(url);
    expect(report).toMatchObject({ notReady: null, uploadBytesPerSecond: null });
    expect(report.problems).toEqual([expect.stringMatching(/^throughput: .*\/ .*404/)]);
    expect(report.tokenSeconds).not.toBeNull();
  });

  test("notices that what it sends is not what arrives", async () => {
    const node = await start({ start: 0, end: 4 });
    const url = inFront(node.url, async (_, path) => (path === "/probe" ? Response.json({ bytes: 7 }) : undefined));
    expect((await probePeer(url)).problems).toEqual([expect.stringContaining("of 65536 bytes it counted 7")]);
  });
});

describe("a probe that cannot be made", () => {
  const failure = (url: string) =>
    probePeer(url).then(
      () => undefined,
      (error: UserError) => error,
    );

  test("of a place where nothing listens says so", async () => {
    const error = await failure("http://127.0.0.1:9");
    expect(error).toMatchObject({ code: "next_unreachable" });
    expect(error!.message).toBe("the node http://127.0.0.1:9/ cannot be reached: nothing listens there");
  });

  test("of something that is no meshnet node says what it answered", async () => {
    const url = inFront("http://127.0.0.1:9", async () => new Response("<html>", { status: 200 }));
    expect(await failure(url)).toMatchObject({ code: "next_nonsense", message: expect.stringContaining("not JSON") });
    const other = inFront("http://127.0.0.1:9", async () => new Response("nothing here", { status: 404 }));
    expect(await failure(other)).toMatchObject({ code: "next_nonsense", message: expect.stringContaining("404") });
  });

  test.each(["info", "forward", "health/ready"])("of a node's /%s asks for host and port alone", async (path) => {
    const node = await start({ start: 0, end: 4 });
    const error = await failure(new URL(path, node.url).href);
    expect(error).toMatchObject({ code: "bad_usage", message: expect.stringContaining(`/${path}`) });
    expect(error!.hint).toEndWith(node.url.replace(/\/$/, ""));
  });

  test("of a path where no meshnet node is says that there may be no path", async () => {
    const url = inFront("http://127.0.0.1:9", async () => new Response("nothing here", { status: 404 }));
    expect(await failure(`${url}info`)).toMatchObject({
      code: "next_nonsense",
      hint: expect.stringContaining(`has no path: ${url.replace(/\/$/, "")}`),
    });
  });

  test("of a node that refuses this name for itself passes its refusal on", async () => {
    const node = await start({ start: 0, end: 4 });
    const url = inFront(node.url, (request, path) =>
      fetch(new URL(path, node.url), { method: request.method, headers: { Host: "elsewhere.example" } }),
    );
    const error = (await failure(url)) as unknown as RemoteError;
    expect([error.status, error.body.code]).toEqual([403, "forbidden_host"]);
  });

  test.each(["here", "ftp://127.0.0.1/", "http://user:secret@127.0.0.1/"])("of %s is wrong usage", async (url) => {
    const error = await failure(url);
    expect(error).toMatchObject({ code: "bad_usage" });
    expect(error!.message).not.toContain("secret");
  });
});

describe("POST /probe", () => {
  test("counts what came, and takes no more than 16 MiB", async () => {
    const node = await start({ start: 0, end: 4 });
    const send = (bytes: number) =>
      fetch(new URL("probe", node.url), { method: "POST", body: new Uint8Array(bytes).fill(1) });
    for (const bytes of [0, 1, MAX_PROBE_BYTES]) expect(await (await send(bytes)).json()).toEqual({ bytes });
    const refused = await send(MAX_PROBE_BYTES + 1);
    expect([refused.status, (await errorOf(refused)).code]).toEqual([413, "too_large"]);
    expect((await fetch(new URL("probe", node.url))).status).toBe(405);
  });
});
