import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { NodeProcess, run, startChain } from "../support/meshnet.ts";
import { Oracle, TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const ids = [...new Oracle(TINY).ints("short.input_ids")];
const JSON_TYPE = { "content-type": "application/json" };
const RAW = { "content-type": "application/octet-stream" };

/** The same shapes, and yet another model: its layer norm has another epsilon. */
const otherFolder = temporaryFolder();
const OTHER = join(otherFolder.path, "other");
cpSync(TINY, OTHER, { recursive: true });
const config = JSON.parse(readFileSync(join(TINY, "config.json"), "utf8"));
writeFileSync(join(OTHER, "config.json"), JSON.stringify({ ...config, layer_norm_epsilon: 2e-5 }));
/** The same model, with a chat template. */
const CHATTY = join(otherFolder.path, "chatty");
cpSync(TINY, CHATTY, { recursive: true });
writeFileSync(join(CHATTY, "chat_template.jinja"), "{{ messages[-1].content }}");
afterAll(() => otherFolder[Symbol.dispose]());

const span = (model: string, start: number, end: number, ...more: string[]) =>
  new NodeProcess(["--model-id", model, "--shard-start", `${start}`, "--shard-end", `${end}`, ...more]);

const forward = (url: string, body: string | Uint8Array<ArrayBuffer> | ArrayBuffer, headers: Record<string, string>) =>
  fetch(`${url}forward`, { method: "POST", headers, body });

const askToken = (url: string) => forward(url, JSON.stringify({ input_ids: [ids] }), JSON_TYPE);

const errorOf = async (reply: Response) => ((await reply.json()) as { error: Record<string, unknown> }).error;

describe("a chain driven by hand", () => {
  let head: string;
  let middle: string;
  let tail: string;
  const nodes = [span(TINY, 0, 1), span(TINY, 1, 2), span(TINY, 2, 4)];
  beforeAll(async () => {
    [head, middle, tail] = (await Promise.all(nodes.map((node) => node.ready()))) as [string, string, string];
  }, 120_000);
  afterAll(() => Promise.all(nodes.map((node) => node.stop("SIGKILL"))));

  test("passes a left-padded batch on with its mask, and answers each row as that row alone", async () => {
    const rows = [[51], ids, ids.slice(0, 3)];
    const first = await forward(head, JSON.stringify({ input_ids: rows }), JSON_TYPE);
    const sideData = {
      "x-meshnet-shape": first.headers.get("x-meshnet-shape")!,
      "x-meshnet-attn-mask": first.headers.get("x-meshnet-attn-mask")!,
    };
    expect(sideData["x-meshnet-shape"]).toBe(`3,${ids.length},96`);
    const second = await forward(middle, await first.arrayBuffer(), { ...RAW, ...sideData });
    const third = await forward(tail, await second.arrayBuffer(), { ...RAW, ...sideData });
    const together = (await third.json()) as { token_ids: number[] };

    const alone: number[] = [];
    for (const row of rows) {
      const one = await forward(head, JSON.stringify({ input_ids: [row] }), JSON_TYPE);
      const shape = { "x-meshnet-shape": `1,${row.length},96` };
      const two = await forward(middle, await one.arrayBuffer(), { ...RAW, ...shape });
      const three = await forward(tail, await two.arrayBuffer(), { ...RAW, ...shape });
      alone.push(((await three.json()) as { token_ids: number[] }).token_ids[0]!);
    }
    expect(together.token_ids).toEqual(alone);
  });

  const session = { "content-type": "text/plain", "x-meshnet-session": "a" };
  test.each([
    ["text", () => forward(middle, "hello", { "content-type": "text/plain" }), 415, "unsupported_spelling"],
    [
      "an odd number of bytes",
      () => forward(tail, new Uint8Array(383), { ...RAW, "x-meshnet-shape": "1,2,96" }),
      400,
      "malformed",
    ],
    [
      "a body that does not match its shape",
      () => forward(tail, new Uint8Array(192), { ...RAW, "x-meshnet-shape": "1,2,96" }),
      400,
      "malformed",
    ],
    [
      "a shape of 2^31",
      () => forward(tail, new Uint8Array(192), { ...RAW, "x-meshnet-shape": "1,2147483648,96" }),
      400,
      "malformed",
    ],
    [
      "a shape that is none",
      () => forward(tail, new Uint8Array(192), { ...RAW, "x-meshnet-shape": "1,x" }),
      400,
      "malformed",
    ],
    [
      "another hidden size",
      () => forward(tail, new Uint8Array(200), { ...RAW, "x-meshnet-shape": "1,1,100" }),
      422,
      "hidden_size",
    ],
    ["a mask of another length", () => masked([1, 1, 1]), 400, "malformed"],
    ["a mask with its padding on the right", () => masked([1, 0]), 422, "right_padding"],
    [
      "NaN",
      () => forward(tail, new Uint8Array(192).fill(0xff), { ...RAW, "x-meshnet-shape": "1,1,96" }),
      422,
      "non_finite",
    ],
    [
      "more tokens than the context",
      () => forward(head, JSON.stringify({ input_ids: [Array(257).fill(1)] }), JSON_TYPE),
      422,
      "context_exceeded",
    ],
    ["an empty prompt", () => forward(head, "", { "content-type": "text/plain" }), 422, "empty_prompt"],
    [
      "invalid UTF-8",
      () => forward(head, Uint8Array.of(0xff, 0xfe), { "content-type": "text/plain" }),
      400,
      "malformed",
    ],
    ["a token id outside the vocabulary", () => forward(head, '{"input_ids":[[1024]]}', JSON_TYPE), 422, "token_id"],
    [
      "a session without a step",
      () => forward(head, "hi", { "content-type": "text/plain", "x-meshnet-session": "a" }),
      400,
      "malformed",
    ],
    [
      "a session that it does not have",
      () => forward(head, "hi", { ...session, "x-meshnet-step": "1", "x-meshnet-pos-start": "3" }),
      409,
      "session_lost",
    ],
  ] as const)("refuses %s and goes on serving", async (_, send, status, code) => {
    const reply = await send();
    const { code: given, message, hint, node, layers } = await errorOf(reply);
    expect({ status: reply.status, code: given }).toEqual({ status, code });
    for (const field of [message, hint, node, layers]) expect(field).toBeString();
    expect((await askToken(head)).status).toBe(200);
    expect((await fetch(`${tail}health/ready`)).status).toBe(200);
  });

  const masked = (mask: number[]) =>
    forward(tail, new Uint8Array(384), {
      ...RAW,
      "x-meshnet-shape": "1,2,96",
      "x-meshnet-attn-mask": Buffer.from(mask).toString("base64"),
    });
});

describe("a chain whose next node", () => {
  test("holds another model never forms: the node ends and says both", async () => {
    await using tail = span(OTHER, 2, 4);
    await using head = span(TINY, 0, 2, "--next", await tail.url);
    expect(await head.exited).toBe(1);
    const digests = head.log.match(/[0-9a-f]{64}/g);
    expect(new Set(digests).size).toBe(2);
  }, 60_000);

  test("starts at another layer never forms: the node ends and says both", async () => {
    await using tail = span(TINY, 3, 4);
    await using head = span(TINY, 0, 2, "--next", await tail.url);
    expect(await head.exited).toBe(1);
    expect(head.log).toMatch(/holds layers 3-4.*ends at layer 2/);
  }, 60_000);

  test("dies gives 502 that names it, and runs again when it is back, unless it is another model: 409", async () => {
    const port = freePort();
    const tailAt = (model: string) => span(model, 2, 4, "--port", `${port}`);
    let tail = tailAt(TINY);
    await tail.url;
    await using head = span(TINY, 0, 2, "--next", `http://127.0.0.1:${port}`);
    const url = await head.ready();
    expect((await askToken(url)).status).toBe(200);

    await tail.stop("SIGKILL");
    const dead = await askToken(url);
    expect({ status: dead.status, code: (await errorOf(dead))["code"] }).toEqual({
      status: 502,
      code: "next_unreachable",
    });

    tail = tailAt(OTHER);
    await tail.url;
    const other = await askToken(url);
    const error = await errorOf(other);
    expect({ status: other.status, code: error["code"] }).toEqual({ status: 409, code: "model_mismatch" });
    await tail.stop("SIGKILL");

    tail = tailAt(TINY);
    await tail.url;
    await head.ready();
    expect((await askToken(url)).status).toBe(200);
    await tail.stop("SIGKILL");
  }, 120_000);
});

describe("nodes of one chain", () => {
  test("may have contexts of different lengths: the least of them is that of the head", async () => {
    await using tail = span(TINY, 2, 4, "--max-context", "100");
    await using head = span(CHATTY, 0, 2, "--next", await tail.url);
    const url = await head.ready();
    expect(await (await fetch(`${url}info`)).json()).toMatchObject({ max_context: 100 });
    const chat = { messages: [{ role: "user", content: "This program is free" }], temperature: 0 };
    const reply = await fetch(`${url}v1/chat/completions`, { method: "POST", body: JSON.stringify(chat) });
    const { usage } = (await reply.json()) as { usage: { total_tokens: number } };
    expect(usage.total_tokens).toBeWithin(90, 102);
    const session = { "X-Meshnet-Session": "a", "X-Meshnet-Step": "1", "X-Meshnet-Pos-Start": "0" };
    expect((await forward(url, "hi", { "content-type": "text/plain", ...session })).status).toBe(200);
    const long = await forward(url, JSON.stringify({ input_ids: [Array(101).fill(7)] }), JSON_TYPE);
    expect(long.status).toBe(422);
    expect(await errorOf(long)).toMatchObject({ code: "context_exceeded", layers: "2-4" });
  }, 60_000);

  test("let a call of many rows through that the first one has let in", async () => {
    await using tail = span(TINY, 2, 4);
    await using head = span(TINY, 0, 2, "--next", await tail.url);
    const rows = Array.from({ length: 1024 }, (_, row) => [row, (row * 7) % 1000]);
    for (const want of ["token", "logits"]) {
      const headers = { ...JSON_TYPE, "x-meshnet-want": want };
      const reply = await forward(await head.ready(), JSON.stringify({ input_ids: rows }), headers);
      expect(reply.status).toBe(200);
      if (want === "token") expect(((await reply.json()) as { token_ids: number[] }).token_ids).toHaveLength(1024);
      else expect((await reply.bytes()).length).toBe(1024 * 1024 * 2);
    }
    expect(head.log).not.toContain("no_room");
  }, 60_000);

  test("speak with each other, and with who asks, past the proxy that is for the rest of the world", async () => {
    const env = { HTTP_PROXY: "http://127.0.0.1:9", http_proxy: "http://127.0.0.1:9" };
    await using chain = await startChain(TINY, [2, 4], { env });
    const { code, stderr } = await run(["generate", "hi", "--head", chain.head, "--max-new-tokens", "2"], { env });
    expect({ code, stderr }).toEqual({ code: 0, stderr: expect.stringMatching(/^2 tokens/) });
    const peer = await run(["doctor", "--quick", "--peer", chain.head, "--json"], { env });
    const { checks } = JSON.parse(peer.stdout) as { checks: { id: string; status: string }[] };
    expect(checks.filter(({ id }) => id.startsWith("peer")).map(({ status }) => status)).not.toContain("fail");
  }, 60_000);
});

describe("a node that is told to stop", () => {
  test.each(["SIGTERM", "SIGINT"] as const)(
    "by %s finishes what runs and exits with 0",
    async (signal) => {
      await using node = span(TINY, 0, 4);
      const url = await node.ready();
      const rows = Array.from({ length: 24 }, () => Array(200).fill(7)); // runs for a moment
      const running = forward(url, JSON.stringify({ input_ids: rows }), JSON_TYPE);
      await Bun.sleep(100);
      expect(await node.stop(signal)).toBe(0);
      expect((await running).status).toBe(200);
    },
    60_000,
  );
});

test("generate on a chain that ends too early says so, and on nothing at all as well", async () => {
  await using head = span(TINY, 0, 2);
  const short = await run(["generate", "hi", "--head", await head.ready()]);
  expect({ code: short.code, stderr: short.stderr }).toEqual({
    code: 1,
    stderr: expect.stringMatching(/no next node that goes on[^]*--next/),
  });
  const nothing = await run(["generate", "hi", "--head", `http://127.0.0.1:${freePort()}`]);
  expect({ code: nothing.code, stderr: nothing.stderr }).toEqual({
    code: 1,
    stderr: expect.stringMatching(/cannot be reached/),
  });
}, 60_000);

/** A port that nothing listens on just now. */
function freePort(): number {
  const listener = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  const { port } = listener;
  listener.stop(true);
  return port;
}
