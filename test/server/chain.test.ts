import { afterEach, describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import { createLogger, silentLogger } from "../../src/base/log.ts";
import { Admission } from "../../src/mesh/admission.ts";
import { NextNode } from "../../src/mesh/next-node.ts";
import { type ContainerTensor, decodeContainer, encodeContainer } from "../../src/protocol/container.ts";
import {
  bytes,
  deviceLost,
  errorOf,
  gate,
  HIDDEN,
  post,
  startChain,
  startNode,
  type TinyNode,
  type TinyNodeOptions,
  toBits,
  until,
  VOCAB,
} from "./tiny-node.ts";

const running: { stop(): Promise<void> | void }[] = [];
afterEach(async () => {
  await Promise.all(running.splice(0).map((node) => node.stop()));
});
async function start(options: TinyNodeOptions): Promise<TinyNode> {
  const node = await startNode(options);
  running.push(node);
  return node;
}

const ask = (node: TinyNode, headers?: Record<string, string>) => post(node.url, "hello", "text/plain", headers);
const isReady = async (node: TinyNode) => (await fetch(new URL("health/ready", node.url))).ok;

describe("a chain", () => {
  test.each([[[]], [[2]], [[1, 3]], [[1, 2, 3]]])("cut at %j answers what the whole model answers", async (cuts) => {
    const nodes = await startChain(cuts);
    running.push(...nodes);
    const reply = await ask(nodes[0]!);
    expect(await reply.json()).toMatchObject({ token_ids: [142] });
    expect(reply.headers.get("X-Meshnet-Layers")).toBe("0-4");
    expect(reply.headers.get("X-Meshnet-Node")).toBe(
      ((await (await fetch(new URL("info", nodes[0]!.url))).json()) as { node: string }).node,
    );
  });

  test("that ends before the tail gives the hidden states of its last node", async () => {
    const middle = await start({ start: 1, end: 3 });
    const head = await start({ start: 0, end: 1, next: middle.url });
    const reply = await ask(head);
    expect([reply.headers.get("X-Meshnet-Shape"), reply.headers.get("X-Meshnet-Layers")]).toEqual([
      `1,6,${HIDDEN}`,
      "0-3",
    ]);
  });

  test("takes the list of its remaining hops as a route", async () => {
    const tail = await start({ start: 2, end: 4 });
    const head = await start({ start: 0, end: 2, next: tail.url });
    expect(await (await ask(head, { "X-Meshnet-Route": JSON.stringify([tail.url]) })).json()).toMatchObject({
      token_ids: [142],
    });
    expect((await ask(head, { "X-Meshnet-Route": "[]" })).headers.get("X-Meshnet-Layers")).toBe("0-2");
    expect((await errorOf(await ask(head, { "X-Meshnet-Route": '["http://127.0.0.1:9"]' }))).code).toBe(
      "not_supported",
    );
  });

  test("keeps the caller's request id, and makes one where there is none", async () => {
    const seen: string[] = [];
    const tail = fakeNext((_, body) => {
      seen.push(decodeContainer(body).metadata["request_id"]!);
      return Response.json({ token_ids: [1], finish: [null] });
    });
    const head = await start({ start: 0, end: 2, next: tail });
    expect((await ask(head, { "X-Meshnet-Request-Id": "mine.1" })).headers.get("X-Meshnet-Request-Id")).toBe("mine.1");
    const made = (await ask(head)).headers.get("X-Meshnet-Request-Id")!;
    expect(made).toMatch(/^[0-9a-f-]{36}$/);
    expect(seen).toEqual(["mine.1", made]);
  });

  test("says in Server-Timing what the next node took", async () => {
    const [head, tail] = await startChain([2]);
    running.push(head!, tail!);
    expect((await ask(head!)).headers.get("Server-Timing")).toMatch(/queue;dur=.*stage;dur=.*next;dur=.*total;dur=/);
  });
});

describe("when the next node fails", () => {
  test("it is down: 502 that names it, and the node goes on serving what it can alone", async () => {
    const tail = await startNode({ start: 2, end: 4 });
    const head = await start({ start: 0, end: 2, next: tail.url });
    await tail.stop();
    const reply = await ask(head);
    expect(reply.status).toBe(502);
    expect(await errorOf(reply)).toMatchObject({ code: "next_unreachable", hop: tail.url, layers: "0-2" });
    expect((await ask(head, { "X-Meshnet-Route": "local" })).status).toBe(200);
    await until(async () => !(await isReady(head)));
    running.push(await startNode({ start: 2, end: 4, port: tail.server.port }));
    await until(() => isReady(head));
    expect((await ask(head)).status).toBe(200);
  });

  test("it dies in the middle of a call: 502 that names it", async () => {
    let calls = 0;
    const dying = Bun.listen({
      hostname: "127.0.0.1",
      port: 0,
      socket: {
        data(socket, data) {
          if (String(data).startsWith("GET /info")) return void socket.end(http(JSON.stringify(infoOfTail)));
          if (String(data).startsWith("GET /health")) return void socket.end(http("{}"));
          calls++;
          socket.write("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{");
          setTimeout(() => socket.terminate(), 20);
        },
      },
    });
    running.push({ stop: () => dying.stop(true) });
    const head = await start({ start: 0, end: 2, next: `http://127.0.0.1:${dying.port}/` });
    const reply = await ask(head);
    expect([reply.status, (await errorOf(reply)).code, calls]).toEqual([502, "next_unreachable", 1]);
  });

  test("the connection breaks before any reply: the call is sent once more, and only once", async () => {
    let calls = 0;
    const resetting = (failures: number) =>
      Bun.listen({
        hostname: "127.0.0.1",
        port: 0,
        socket: {
          data(socket, data) {
            if (String(data).startsWith("GET /info")) return void socket.end(http(JSON.stringify(infoOfTail)));
            if (String(data).startsWith("GET /health")) return void socket.end(http("{}"));
            if (!String(data).startsWith("POST")) return; // a second packet of one call
            if (++calls <= failures) return socket.terminate();
            socket.end(http('{"token_ids":[5],"finish":[null]}'));
          },
        },
      });
    const once = resetting(1);
    const always = resetting(Infinity);
    running.push({ stop: () => once.stop(true) }, { stop: () => always.stop(true) });
    const lucky = await start({ start: 0, end: 2, next: `http://127.0.0.1:${once.port}/` });
    expect(await (await ask(lucky)).json()).toMatchObject({ token_ids: [5] });
    expect(calls).toBe(2);
    calls = 0;
    const unlucky = await start({ start: 0, end: 2, next: `http://127.0.0.1:${always.port}/` });
    expect([(await ask(unlucky)).status, calls]).toEqual([502, 2]);
  });

  test("it hangs: 504 that names it, when the caller's patience or the hop's own time is over", async () => {
    const { wait, open } = gate();
    const tail = await start({ start: 2, end: 4, gate: wait });
    const head = await start({ start: 0, end: 2, next: tail.url, hopTimeoutMs: 50 });
    const [patient, hasty] = await Promise.all([ask(head), ask(head, { "X-Meshnet-Deadline-Ms": "30" })]);
    expect(patient.status).toBe(504);
    expect(await errorOf(patient)).toMatchObject({ code: "deadline", hop: tail.url });
    expect([hasty.status, (await errorOf(hasty)).code]).toEqual([504, "deadline"]);
    open();
  });

  test("its error comes back with its own status, node and layers", async () => {
    const tail = await start({ start: 3, end: 4, node: "the-tail", gate: () => Promise.reject(deviceLost()) });
    const middle = await start({ start: 1, end: 3, next: tail.url, eager: true });
    const head = await start({ start: 0, end: 1, next: middle.url, eager: true });
    await until(() => head.admission!.refusal === undefined && middle.admission!.refusal === undefined);
    const reply = await ask(head);
    expect([reply.status, reply.headers.get("Retry-After")]).toEqual([503, "1"]);
    expect(await errorOf(reply)).toMatchObject({ code: "device_lost", node: "the-tail", layers: "3-4" });
  });

  test("its bug is a 500 of its own node, without a stack", async () => {
    const tail = await start({ start: 2, end: 4, node: "the-tail", gate: () => Promise.reject(new Error("secret")) });
    const head = await start({ start: 0, end: 2, next: tail.url });
    const reply = await ask(head);
    expect(reply.status).toBe(500);
    const error = await errorOf(reply);
    expect(error).toMatchObject({ code: "internal", node: "the-tail" });
    expect(JSON.stringify(error)).not.toMatch(/secret|\.ts/);
  });

  const hidden = (shape: [number, number]): ContainerTensor => {
    return { name: "hidden_states", dtype: "BF16", shape, data: new Uint16Array(shape[0] * shape[1]) };
  };
  const containerReply = (...tensors: ContainerTensor[]) =>
    new Response(encodeContainer(tensors), { headers: { "Content-Type": "application/x-safetensors" } });
  test.each([
    { what: "a web page", reply: () => new Response("<html>", { headers: { "Content-Type": "text/html" } }) },
    { what: "an error that is not meshnet's", reply: () => new Response("Bad Gateway", { status: 502 }) },
    { what: "a redirect", reply: () => Response.redirect("http://127.0.0.1:1/") },
    { what: "JSON of something else", reply: () => Response.json({ hello: "world" }) },
    {
      what: "JSON that is cut",
      reply: () => new Response('{"token_ids"', { headers: { "Content-Type": "application/json" } }),
    },
    {
      what: "a token for a row that is not there",
      reply: () => Response.json({ token_ids: [1, 2], finish: [null, null] }),
    },
    { what: "a token beyond the vocabulary", reply: () => Response.json({ token_ids: [VOCAB], finish: [null] }) },
    { what: "another ending than stop", reply: () => Response.json({ token_ids: [1], finish: ["length"] }) },
    { what: "hidden states of another length", reply: () => containerReply(hidden([5, HIDDEN])) },
    { what: "hidden states of another width", reply: () => containerReply(hidden([6, 8])) },
    { what: "no tensor", reply: () => containerReply() },
    { what: "204 to a call for a token", reply: () => new Response(null, { status: 204 }) },
    {
      what: "more bytes than it could be",
      reply: () => new Response(new Uint8Array(2 << 20), { headers: { "Content-Type": "application/json" } }),
    },
  ])("it answers $what: 502 that names it", async ({ reply }) => {
    const next = fakeNext(reply);
    const head = await start({ start: 0, end: 2, next });
    const answer = await ask(head);
    expect(answer.status).toBe(502);
    expect(await errorOf(answer)).toMatchObject({ code: "next_nonsense", hop: next, layers: "0-2" });
  });
});

describe("admission", () => {
  const context = { own: 4096, edge: 4096 };
  const own = { node: "own", model: "digest-of-tiny", end: 2, hiddenSize: HIDDEN, vocabSize: VOCAB, context };
  const admit = (url: string) => {
    const admission = new Admission({
      next: new NextNode({ url, own }),
      log: silentLogger,
      poll: { firstMs: 5, mostMs: 20 },
    });
    running.push({ stop: () => admission.stop() });
    return admission.start();
  };

  test.each([
    {
      what: "another model",
      info: { model: "other", model_id: "gpt9" },
      code: "model_mismatch",
      says: /other \(gpt9\).*digest-of-tiny/,
    },
    { what: "another version", info: { v: 2 }, code: "next_nonsense", says: /version 2.*version 1/ },
    {
      what: "a start that is not this node's end",
      info: { start: 3 },
      code: "from_layer",
      says: /3-4.*ends at layer 2/,
    },
    {
      what: "another hidden size",
      info: { hidden_size: 8 },
      code: "model_mismatch",
      says: /hidden size 8.*hidden size 4/,
    },
    {
      what: "another vocabulary",
      info: { vocab_size: 9 },
      code: "model_mismatch",
      says: /vocabulary 9.*vocabulary 256/,
    },
    {
      what: "a context on the other side of where the model turns positions otherwise",
      info: { max_context: 4097 },
      code: "model_mismatch",
      says: /context of 4097 tokens.*one of 4096/,
    },
  ])("a next node with $what is refused with both values, and the node may exit", async ({ info, code, says }) => {
    const error: UserError = await admit(fakeNext(() => new Response(), { ...infoOfTail, ...info })).then(
      () => undefined,
      (error) => error,
    );
    expect(error).toBeInstanceOf(UserError);
    expect([error.code as string, error.message]).toEqual([code, expect.stringMatching(says)]);
  });

  test("a URL that is none is wrong usage", () => {
    expect(() => new NextNode({ url: "b:8000", own })).toThrow(/b:8000/);
  });

  test("nodes may be started in any order: the first waits, and says 503 meanwhile", async () => {
    const taken = await startNode({ start: 2, end: 4 });
    const { port } = taken.server;
    await taken.stop();
    const head = await start({ start: 0, end: 2, next: `http://127.0.0.1:${port}`, eager: true });
    const ready = await fetch(new URL("health/ready", head.url));
    expect([ready.status, (await errorOf(ready)).message]).toEqual([503, expect.stringContaining(String(port))]);
    const early = await ask(head);
    expect([early.status, (await errorOf(early)).code]).toEqual([503, "not_ready"]);
    expect((await fetch(new URL("health/live", head.url))).status).toBe(200);
    running.push(await startNode({ start: 2, end: 4, port }));
    await until(() => isReady(head));
    expect((await ask(head)).status).toBe(200);
  });

  test("a node is ready when all after it are, and not when one of them is not", async () => {
    let broken = true;
    const tail = await start({ start: 3, end: 4, gate: () => (broken ? Promise.reject(deviceLost()) : undefined) });
    const middle = await start({ start: 1, end: 3, next: tail.url, eager: true });
    const head = await start({ start: 0, end: 1, next: middle.url, eager: true });
    await until(() => head.admission!.refusal === undefined);
    const ready = () => fetch(new URL("health/ready", head.url));
    await until(async () => (await errorOf(await ready())).message.includes("the device is gone"));
    expect((await ready()).status).toBe(503);
    broken = false;
    await until(() => isReady(head));
  });

  test("readiness is not asked along the chain with each question", async () => {
    let asked = 0;
    const next = fakeNext(
      () => new Response(),
      infoOfTail,
      () => asked++,
    );
    const head = await start({ start: 0, end: 2, next });
    await until(() => isReady(head));
    asked = 0;
    await Promise.all(Array.from({ length: 50 }, () => isReady(head)));
    expect(asked).toBeLessThan(10);
    expect(head.stage.calls).toBe(1);
  });

  test("a next node that was replaced by one that does not fit is refused, and its right successor admitted", async () => {
    const lines: string[] = [];
    const log = createLogger({ level: "error", format: "text", write: (line) => lines.push(line) });
    const tail = await startNode({ start: 2, end: 4 });
    const { port } = tail.server;
    const head = await start({ start: 0, end: 2, next: tail.url, log });
    await tail.stop();
    const stranger = await startNode({ start: 2, end: 4, model: "other", port });
    const reply = await ask(head);
    expect([reply.status, (await errorOf(reply)).code]).toEqual([409, "model_mismatch"]);
    await until(() => lines.length > 0);
    expect(lines[0]).toContain("does not fit");
    expect(await isReady(head)).toBe(false);
    expect((await errorOf(await ask(head))).code).toBe("model_mismatch");
    await stranger.stop();
    running.push(await startNode({ start: 2, end: 4, port }));
    await until(() => isReady(head));
    expect((await ask(head)).status).toBe(200);
  });

  test("a tensor for another model is refused by the node it reaches", async () => {
    const tail = await start({ start: 2, end: 4 });
    const headers = { "X-Meshnet-Shape": `1,1,${HIDDEN}`, "X-Meshnet-Model": "other" };
    const reply = await post(tail.url, bytes(toBits([1, 0, 0, 0])), "application/octet-stream", headers);
    expect([reply.status, (await errorOf(reply)).code]).toEqual([409, "model_mismatch"]);
  });
});

test("GET /info says what the node is", async () => {
  const tail = await start({ start: 2, end: 4 });
  const head = await start({ start: 0, end: 2, next: tail.url, node: "the-head" });
  expect(await (await fetch(new URL("info", head.url))).json()).toEqual({
    v: 1,
    node: "the-head",
    model_id: "tiny",
    revision: null,
    model: "digest-of-tiny",
    tokenizer: "tiny-tokenizer",
    layers: 4,
    start: 0,
    end: 2,
    quantization: "bfloat16",
    numerics: "tiny-numerics",
    hidden_size: HIDDEN,
    vocab_size: VOCAB,
    max_context: 40,
    max_sessions: 1024,
    max_rows: 1024,
    max_body_bytes: 256 << 20,
    device: "none",
    memory: { planned: 3, allocated: 2, available: null },
    cache: { page_tokens: 4, pages: 400, reserved_pages: 0, sessions: 0, prefix_hits: 0, prefix_tokens: 0 },
    next: tail.url,
  });
});

const infoOfTail = {
  v: 1,
  node: "fake",
  model_id: "tiny",
  model: "digest-of-tiny",
  layers: 4,
  start: 2,
  end: 4,
  hidden_size: HIDDEN,
  vocab_size: VOCAB,
  max_context: 2048,
};

/** A next node that answers a call as a test wants. */
function fakeNext(
  answer: (request: Request, body: Uint8Array) => Response,
  info: object = infoOfTail,
  onReady: () => void = () => {},
): string {
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    routes: {
      "/info": () => Response.json(info),
      "/health/ready": () => (onReady(), new Response()),
      "/forward": async (request) => answer(request, await request.bytes()),
    },
  });
  running.push({ stop: () => server.stop(true) });
  return server.url.href;
}

const http = (body: string): string =>
  `HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: ${body.length}\r\n\r\n${body}`;
