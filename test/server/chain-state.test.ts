import { afterEach, describe, expect, test } from "bun:test";
import { TokenMeter } from "../../src/server/token-meter.ts";
import type { ChainInfo, ChainNode } from "../../src/protocol/chain.ts";
import { errorOf, post, startChain, startNode, type TinyNode, until } from "./tiny-node.ts";

const started: { stop(): unknown }[] = [];
afterEach(async () => {
  for (const one of started.splice(0)) await one.stop();
});

const running = async <T extends TinyNode | TinyNode[]>(promise: Promise<T>): Promise<T> => {
  const nodes = await promise;
  started.push(...[nodes].flat());
  return nodes;
};

let now = 0;
const clock = () => now;

const chainOf = async (url: string, headers: Record<string, string> = {}): Promise<readonly ChainNode[]> => {
  const reply = await fetch(new URL("chain", url), { headers });
  expect(reply.status).toBe(200);
  return ((await reply.json()) as ChainInfo).nodes;
};

/** Stands before a node and passes everything on, but for `/chain`, which `answer` gives. */
function impostor(node: TinyNode, answer: (request: Request) => Response | Promise<Response>) {
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    fetch: (request) => {
      const { pathname } = new URL(request.url);
      return pathname === "/chain" ? answer(request) : fetch(new URL(pathname, node.url), { method: request.method });
    },
  });
  started.unshift({ stop: () => server.stop(true) });
  return server.url.href;
}

/** A head before such a one. */
async function headBefore(answer: (request: Request, tail: TinyNode) => Response | Promise<Response>) {
  const tail = await running(startNode({ start: 2, end: 4 }));
  const next = impostor(tail, (request) => answer(request, tail));
  return { tail, head: await running(startNode({ start: 0, end: 2, next, clock })) };
}

describe("GET /chain", () => {
  test("tells of every node from the asked one on, in the order of layers, in the words of each", async () => {
    const nodes = await running(startChain([1, 3]));
    await until(() => nodes.every(({ admission }) => admission?.notReady === undefined));
    const told = await chainOf(nodes[0]!.url);
    expect(told.map(({ node, start, end, ready }) => [node !== null, start, end, ready])).toEqual([
      [true, 0, 1, true],
      [true, 1, 3, true],
      [true, 3, 4, true],
    ]);
    expect(new Set(told.map(({ node }) => node)).size).toBe(3);
    expect(told[2]).toMatchObject({ device: "none", quantization: "bfloat16", sessions: 0, problem: null });
    expect((await chainOf(nodes[1]!.url)).map(({ start }) => start)).toEqual([1, 3]);
  });

  test("counts the tokens of calls and open sessions, and no probes", async () => {
    const nodes = await running(startChain([2], { clock }));
    await fetch(new URL("health/ready", nodes[0]!.url));
    expect((await chainOf(nodes[0]!.url)).map((node) => node.tokens_per_second)).toEqual([0, 0]);
    now += 1001; // what was told of the others is kept for a second
    const session = { "x-meshnet-session": "s", "x-meshnet-step": "1", "x-meshnet-pos-start": "0" };
    await post(nodes[0]!.url, "twelve bytes", "text/plain", session);
    await post(nodes[0]!.url, "and eleven.", "text/plain");
    for (const { tokens_per_second, sessions } of await chainOf(nodes[0]!.url)) {
      expect(tokens_per_second).toBeGreaterThan(4); // 25 tokens, over 4.5 to 5 s
      expect(tokens_per_second).toBeLessThan(6);
      expect(sessions).toBe(1);
    }
  });

  test("tells of a node that does not answer what is known of it, and of those beyond it nothing", async () => {
    const nodes = await running(startChain([1, 3]));
    await nodes[1]!.stop();
    const [head, silent, ...beyond] = await chainOf(nodes[0]!.url);
    expect(beyond).toEqual([]);
    expect(silent).toMatchObject({ node: null, start: 1, end: 3, device: "none", sessions: null, ready: false });
    expect(silent!.problem).toContain(nodes[1]!.url);
    await until(() => nodes[0]!.admission!.notReady !== undefined);
    expect((await chainOf(nodes[0]!.url))[0]).toMatchObject({ node: head!.node, ready: false });
  });

  test("does not ask a next node that was never admitted", async () => {
    const head = await running(startNode({ start: 0, end: 2, next: "http://127.0.0.1:1/", eager: true }));
    const [, silent] = await chainOf(head.url);
    expect(silent).toMatchObject({ node: null, start: 2, end: null, device: null });
    expect(silent!.problem).toMatch(/cannot be reached|has not answered/);
  });

  test("does not wait for one that hangs: two seconds, or what the caller gives, of which the next one gets a part", async () => {
    const deadlines: number[] = [];
    const { head } = await headBefore((request) => {
      deadlines.push(Number(request.headers.get("X-Meshnet-Deadline-Ms")));
      return deadlines.length > 1 ? new Response() : new Promise(() => {});
    });
    const began = performance.now();
    const [own, silent] = await chainOf(head.url, { "X-Meshnet-Deadline-Ms": "300" });
    expect(performance.now() - began).toBeLessThan(1500);
    expect(own!.ready).toBe(true);
    expect(silent).toMatchObject({ node: null, start: 2, end: 4, problem: expect.stringContaining("did not answer") });
    expect(deadlines).toEqual([270]);
    now += 1001;
    await chainOf(head.url, { "X-Meshnet-Deadline-Ms": "999999" });
    expect(deadlines).toEqual([270, 1800]);
    now += 1001;
    const [, far] = await chainOf(head.url, { "X-Meshnet-Deadline-Ms": "50" });
    expect(far!.problem).toContain("no time left");
    expect(deadlines).toHaveLength(2); // it was not even asked
  });

  test("asks once for all who look within a second", async () => {
    let asked = 0;
    const { head } = await headBefore((_, tail) => {
      asked++;
      return fetch(new URL("chain", tail.url));
    });
    const all = await Promise.all(Array.from({ length: 20 }, () => chainOf(head.url)));
    expect(new Set(all.map((nodes) => nodes.length))).toEqual(new Set([2]));
    await chainOf(head.url);
    expect(asked).toBe(1);
    now += 1001;
    await chainOf(head.url);
    expect(asked).toBe(2);
  });

  const node = { node: "n", start: 2, end: 4, device: "d", quantization: "q", sessions: 0, ready: true, problem: null };
  test.each([
    ["no JSON", "<html>"],
    ["no list", '{"nodes": 5}'],
    ["an empty list", '{"nodes": []}'],
    ["no object in it", '{"nodes": [null]}'],
    ["a node without layers", JSON.stringify({ nodes: [{ ...node, start: undefined }] })],
    ["another layer than follows", JSON.stringify({ nodes: [{ ...node, start: 1 }] })],
    ["a node that ends before it starts", JSON.stringify({ nodes: [{ ...node, end: 2 }] })],
    ["the same layers twice", JSON.stringify({ nodes: [node, node] })],
    ["a number for a text", JSON.stringify({ nodes: [{ ...node, device: 7 }] })],
    ["a text for a number", JSON.stringify({ nodes: [{ ...node, sessions: "many" }] })],
    ["nodes without end", JSON.stringify({ nodes: Array.from({ length: 5000 }, () => node) })],
  ])("calls it nonsense where the next node says %s", async (_, body) => {
    const { head } = await headBefore(() => new Response(body));
    const [, silent, ...more] = await chainOf(head.url);
    expect(more).toEqual([]);
    expect(silent).toMatchObject({ node: null, problem: expect.stringContaining("answered nonsense: its /chain") });
  });

  test("passes on what it knows of a node's words, and of long ones the beginning", async () => {
    const body = { nodes: [{ ...node, prompt: "secret", device: "d".repeat(100_000) }] };
    const { head } = await headBefore(() => Response.json(body));
    const [own, told] = await chainOf(head.url);
    expect(Object.keys(told!)).toEqual(Object.keys(own!));
    expect(told!.device).toBe("d".repeat(500));
    expect(told!.tokens_per_second).toBeNull();
  });

  test("refuses a deadline that is none", async () => {
    const head = await running(startNode({ start: 0, end: 4 }));
    const reply = await fetch(`${head.url}chain`, { headers: { "X-Meshnet-Deadline-Ms": "soon" } });
    expect([reply.status, (await errorOf(reply)).code]).toEqual([400, "malformed"]);
  });
});

test("the speed is that of the last five seconds", () => {
  let now = 0;
  const meter = new TokenMeter(() => now);
  expect(meter.perSecond).toBe(0);
  for (; now < 20_000; now += 10) meter.count(1);
  expect(meter.perSecond).toBeCloseTo(100, 1);
  now += 2_499;
  expect(meter.perSecond).toBeCloseTo(50, 1);
  now += 2_499;
  expect(meter.perSecond).toBeLessThan(1);
  now += 10;
  expect(meter.perSecond).toBe(0);
});
