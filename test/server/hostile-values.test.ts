import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { createLogger } from "../../src/base/log.ts";
import { generationDefaults } from "../../src/models/generation-config.ts";
import { encodeContainer } from "../../src/protocol/container.ts";
import { ChatTemplate } from "../../src/tokenizer/chat-template.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { ask } from "./openai-calls.ts";
import { bytes, HIDDEN, startNode, type TinyNode, tinyTokenizer, toBits } from "./tiny-node.ts";

const folder = temporaryFolder();
writeFileSync(
  join(folder.path, "chat_template.jinja"),
  "{% for m in messages %}{{ m.content }}{{ m.x | tojson }}{% endfor %}",
);

const lines: string[] = [];
let head: TinyNode;
let tail: TinyNode;
beforeAll(async () => {
  const log = createLogger({ level: "debug", format: "text", write: (line) => lines.push(line) });
  const chatTemplate = ChatTemplate.load(folder.path, tinyTokenizer);
  const textModel = { defaults: generationDefaults(undefined, {}), chatTemplate };
  head = await startNode({ start: 0, end: 4, log, textModel });
  tail = await startNode({ start: 2, end: 4, log });
});
afterAll(async () => {
  await Promise.all([head.stop(), tail.stop()]);
  folder[Symbol.dispose]();
});

/** Each as JSON. */
const HOSTILE = {
  "a deep list": `${"[".repeat(100_000)}${"]".repeat(100_000)}`,
  "a deep object": `${'{"a":'.repeat(100_000)}1${"}".repeat(100_000)}`,
  "a long text": `"${"x".repeat(300_000)}"`,
  "a long list": `[${Array(100_000).fill("{}").join(",")}]`,
};

const COMMON = [
  "model",
  "n",
  "stream",
  "stream_options",
  "stop",
  "stop_token_ids",
  "seed",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "max_tokens",
  "logprobs",
  "logit_bias",
  "frequency_penalty",
  "response_format",
  "modalities",
];
const PLACES: [path: "completions" | "chat/completions", place: string, body: (value: string) => string][] = [
  ...["prompt", "echo", "suffix", "best_of", "add_special_tokens", ...COMMON].map(
    (name) => ["completions", name, (value: string) => `{"prompt":"a","max_tokens":1,"${name}":${value}}`] as never,
  ),
  ...["top_logprobs", "tools", "functions", "chat_template_kwargs", "messages", ...COMMON].map(
    (name) =>
      [
        "chat/completions",
        name,
        (value: string) =>
          `{"messages":[{"role":"user","content":"a"}],"tool_choice":"none","max_tokens":1,"${name}":${value}}`,
      ] as never,
  ),
  ...["role", "content", "tool_calls", "x"].map(
    (name) =>
      [
        "chat/completions",
        `messages[0].${name}`,
        (value: string) => `{"max_tokens":1,"messages":[{"role":"user","content":"a","${name}":${value}}]}`,
      ] as never,
  ),
];

/** A reply is never the node's fault, and says no more of a value than anybody reads. */
async function check(reply: Response): Promise<void> {
  const text = await reply.text();
  expect(reply.status).toBeLessThan(500);
  if (reply.status >= 400) expect(text.length).toBeLessThan(1000);
}

describe.each(Object.entries(HOSTILE))("%s", (_, value) => {
  test.each(PLACES)("in %s as %s is refused in few words, or taken", async (path, _place, body) => {
    await check(await ask(head.url, path, body(value)));
  });

  test.each(["prompt", "input_ids", "add_special_tokens", "strange"])(
    "in a JSON call as %s is refused in few words, or taken",
    async (name) => {
      for (const body of [
        `{"${name}":${value}}`,
        `{"prompt":"a","${name}":${value}}`,
        `{"input_ids":[${value}]}`,
        `{"input_ids":[[${value}]]}`,
      ]) {
        const headers = { "Content-Type": "application/json" };
        await check(await fetch(`${head.url}forward`, { method: "POST", headers, body }));
      }
    },
  );

  const FIELDS = ["n", "session", "pos_start", "max_len", "prefix", "step", "want", "sampling", "strange"];
  const SAMPLINGS = ["temperature", "seed", "stop_token_ids", "strange"];
  test.each([
    ...FIELDS.map((name) => ({ rows: `[{"n":1,"${name}":${value}}]` })),
    ...SAMPLINGS.map((name) => ({ rows: `[{"n":1,"sampling":{"${name}":${value}}}]` })),
    ...["v", "from_layer", "model", "route", "deadline_ms", "request_id", "rows"].map((name) => ({ [name]: value })),
  ])("in a container's metadata is refused in few words, or taken (%#)", async (metadata: Record<string, string>) => {
    const data = bytes(toBits(Array(HIDDEN).fill(0)));
    const body = encodeContainer([{ name: "hidden_states", dtype: "BF16", shape: [1, HIDDEN], data }], metadata);
    const headers = { "Content-Type": "application/x-safetensors" };
    await check(await fetch(`${tail.url}forward`, { method: "POST", headers, body }));
  });
});

test("in headers and paths, long texts are refused in few words", async () => {
  const long = "x".repeat(5000);
  for (const name of [
    "Version",
    "From-Layer",
    "Model",
    "Route",
    "Deadline-Ms",
    "Request-Id",
    "Session",
    "Step",
    "Want",
    "Sampling",
    "Shape",
  ]) {
    const headers = { "Content-Type": "text/plain", [`X-Meshnet-${name}`]: long };
    const reply = await fetch(`${head.url}forward`, { method: "POST", headers, body: "a" });
    expect(reply.status).toBeGreaterThanOrEqual(400);
    await check(reply);
  }
  await check(await fetch(`${head.url}forward`, { method: "POST", headers: { "Content-Type": long }, body: "a" }));
  const digest = { "Content-Type": "text/plain", "Content-Digest": `sha-256=${long}` };
  await check(await fetch(`${head.url}forward`, { method: "POST", headers: digest, body: "a" }));
  await check(await fetch(`${head.url}info`, { headers: { Origin: `http://${long}` } }));
  await check(await fetch(`${head.url}info`, { headers: { Host: long } }));
  const raw = { "Content-Type": "application/octet-stream", "X-Meshnet-Shape": long };
  await check(await fetch(`${tail.url}forward`, { method: "POST", headers: raw, body: "ab" }));
  const tensors: [name: string, shape: number[]][] = [
    [long, [2]],
    ["hidden_states", [0, ...Array<number>(2000).fill(1)]],
  ];
  for (const [name, shape] of tensors) {
    const data = new Uint8Array(2 * shape[0]!);
    const container = encodeContainer([{ name, dtype: "BF16", shape, data }], {});
    const headers = { "Content-Type": "application/x-safetensors" };
    await check(await fetch(`${tail.url}forward`, { method: "POST", headers, body: container }));
  }
  await check(await fetch(`${head.url}${long}`));
  await check(await fetch(`${head.url}sessions/${long}`, { method: "DELETE" }));
  await check(await fetch(`${head.url}v1/models/${long}`));
});

test("none of it is a bug in the log", () => {
  expect(lines.length).toBeGreaterThan(100);
  expect(lines.filter((line) => /a bug/.test(line))).toEqual([]);
});
