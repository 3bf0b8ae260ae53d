import { afterEach, describe, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { createLogger } from "../../src/base/log.ts";
import { generationDefaults } from "../../src/models/generation-config.ts";
import type { TextModel } from "../../src/server/openai/text-model.ts";
import { ChatTemplate } from "../../src/tokenizer/chat-template.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { ask, blocksOf, complete, eventsOf, openAiErrorOf, textsOf } from "./openai-calls.ts";
import {
  CONTEXT,
  deviceLost,
  gate,
  post,
  startNode as start,
  startChain,
  type TinyNode,
  type TinyNodeOptions,
  tinyTokenizer,
  until,
} from "./tiny-node.ts";

const started: TinyNode[] = [];
afterEach(async () => {
  await Promise.all(started.splice(0).map((node) => node.stop()));
});

async function startNode(options: Partial<TinyNodeOptions> = {}): Promise<TinyNode> {
  const node = await start({ start: 0, end: 4, ...options });
  started.push(node);
  return node;
}

async function chain(options: Partial<TinyNodeOptions> = {}): Promise<[TinyNode, TinyNode]> {
  const nodes = await startChain([2], options);
  started.push(...nodes);
  return nodes as [TinyNode, TinyNode];
}

/** Each message as `role: content`, and what the answer begins with. */
const TEMPLATE =
  "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}";
const folder = temporaryFolder();
writeFileSync(join(folder.path, "chat_template.jinja"), TEMPLATE);
const textModel: TextModel = {
  defaults: generationDefaults(undefined, {}),
  chatTemplate: ChatTemplate.load(folder.path, tinyTokenizer),
};

const A = 97; // "a"
const chatOf = (content: unknown, more: object = {}) => ({ messages: [{ role: "user", content }], ...more });

describe("a completion", () => {
  test("is the same whole and as a stream, whose last events tell why it ended and what was used", async () => {
    const [head] = await chain();
    const request = { prompt: "hi", max_tokens: 6, temperature: 0 };
    const whole = await complete(head.url, request);
    const reply = await ask(head.url, "completions", {
      ...request,
      stream: true,
      stream_options: { include_usage: true },
    });
    expect(reply.headers.get("content-type")).toStartWith("text/event-stream");
    const events = await eventsOf(reply);
    expect(textsOf(events)).toEqual([whole.choices[0]!.text]);
    expect(whole.choices[0]!.finish_reason).toBe("length");
    expect(events.at(-2)!.choices[0]!.finish_reason).toBe("length");
    expect(events.at(-1)).toMatchObject({ choices: [], usage: { prompt_tokens: 3, completion_tokens: 6 } });
    expect(events.slice(0, -1).every(({ usage }) => usage === null)).toBe(true);
    expect(whole.usage).toMatchObject({ prompt_tokens: 3, completion_tokens: 6 });
  });

  test("has 16 tokens unless told otherwise, or what the context has left", async () => {
    const { url } = await startNode({ token: A });
    expect((await complete(url, { prompt: "hi" })).choices[0]!.text).toBe("a".repeat(16));
    const left = await complete(url, { prompt: "x".repeat(CONTEXT - 4) });
    expect(left.choices[0]).toMatchObject({ text: "aaa", finish_reason: "length" });
  });

  test("goes on from a text, from texts, from token ids and from lists of them", async () => {
    const { url } = await startNode({ token: A });
    const texts = async (prompt: unknown) =>
      (await complete(url, { prompt, max_tokens: 2, echo: true })).choices.map(({ text }) => text);
    expect(await texts("hi")).toEqual(["hiaa"]);
    expect(await texts(["hi", "ho"])).toEqual(["hiaa", "hoaa"]);
    expect(await texts([104, 105])).toEqual(["hiaa"]);
    expect(await texts([[104, 105], [104]])).toEqual(["hiaa", "haa"]);
  });

  test("ends at the model's end-of-text token, which is no part of it but is counted", async () => {
    const { url } = await startNode({ token: A, eosTokenIds: [A] });
    const { choices, usage } = await complete(url, { prompt: "hi" });
    expect(choices[0]).toMatchObject({ text: "", finish_reason: "stop" });
    expect(usage.completion_tokens).toBe(1);
  });

  test("ends before a stop string that several tokens make, of which nothing is shown", async () => {
    const { url } = await startNode({ token: A });
    const request = { prompt: "hi", max_tokens: 9, stop: ["b", "aaa"], logprobs: 1 };
    const { choices, usage } = await complete(url, request);
    expect(choices[0]).toMatchObject({ text: "", finish_reason: "stop", logprobs: { tokens: [] } });
    expect(usage.completion_tokens).toBe(3);
    const held = await eventsOf(await ask(url, "completions", { ...request, stop: "aaaaaaaaaaaa", stream: true }));
    expect(textsOf(held)).toEqual(["a".repeat(9)]); // held back to the end, and then given out
    expect(held).toHaveLength(1);
  });

  test("with max_tokens 0 is empty, or the prompt that it echoes, with its logprobs", async () => {
    const { url, stage } = await startNode();
    const none = await complete(url, { prompt: "hi", max_tokens: 0 });
    expect(none.choices[0]).toMatchObject({ text: "", finish_reason: "length" });
    expect(none.usage).toMatchObject({ prompt_tokens: 3, completion_tokens: 0 });
    expect(stage.steps).toBe(0);
    const echo = await complete(url, { prompt: "hi", max_tokens: 0, echo: true, logprobs: 2 });
    const { text, logprobs } = echo.choices[0]!;
    expect(text).toBe("hi");
    expect(logprobs!.tokens).toEqual(["\0", "h", "i"]);
    expect(logprobs!.token_logprobs[0]).toBeNull();
    // One of 256 logits is 1, the others are 0.
    const [least, most] = [-Math.log(255 + Math.E), 1 - Math.log(255 + Math.E)];
    for (const value of logprobs!.token_logprobs.slice(1)) {
      expect(Math.min(Math.abs(value! - least), Math.abs(value! - most))).toBeLessThan(1e-9);
    }
    expect(logprobs!.top_logprobs![0]).toBeNull();
    await until(() => stage.cacheUse.sessions === 0);
  });

  test("of n choices has distinct draws, the same ones again for the same seed, and reads the prompt in once", async () => {
    const [head, tail] = await chain({ textModel });
    const request = { prompt: "0123456789", n: 4, max_tokens: 3, temperature: 1, seed: 5 };
    const { choices, usage } = await complete(head.url, request);
    const texts = choices.map(({ text }) => text);
    expect(new Set(texts).size).toBe(4);
    expect(choices.map(({ index }) => index)).toEqual([0, 1, 2, 3]);
    expect(usage).toMatchObject({ prompt_tokens: 11, completion_tokens: 12 });
    expect([head.stage.prefixHits, tail.stage.prefixHits]).toEqual([3, 3]);
    const again = await complete(head.url, request);
    expect(again.choices.map(({ text }) => text)).toEqual(texts);
    expect(again.usage.prompt_tokens_details.cached_tokens).toBe(8);
    const first = await complete(head.url, { ...request, n: 1 });
    expect(first.choices[0]!.text).toBe(texts[0]!);
  });

  test("is drawn with a temperature of 1 where neither caller nor model says how, and as the model says where it does", async () => {
    const seen: object[] = [];
    const refuse = ({ sampling }: { sampling?: object }) => void (sampling && seen.push(sampling));
    const plain = await startNode({ refuse });
    await complete(plain.url, { prompt: "hi", max_tokens: 1, seed: 1 });
    const config = { do_sample: true, temperature: 0.6, top_k: 20, repetition_penalty: 1.1 };
    const told = await startNode({ refuse, textModel: { defaults: generationDefaults(config, {}) } });
    await complete(told.url, { prompt: "hi", max_tokens: 1, seed: 1 });
    await complete(told.url, { prompt: "hi", max_tokens: 1, seed: 1, temperature: 0.5, top_k: -1 });
    await complete(told.url, { prompt: "hi", max_tokens: 1, temperature: 0, repetition_penalty: 1 });
    const filters = { top_p: 1, min_p: 0 };
    expect(seen).toEqual([
      { temperature: 1, top_k: 0, ...filters, seed: 1 },
      { temperature: 0.6, top_k: 20, ...filters, repetition_penalty: 1.1, seed: 1 },
      { temperature: 0.5, top_k: 0, ...filters, repetition_penalty: 1.1, seed: 1 },
      { temperature: 0, seed: expect.any(Number) },
    ]);
  });
});

describe("a chat", () => {
  test("goes through the template, and the answer's first event has the role", async () => {
    const { url } = await startNode({ token: A, textModel });
    const messages = [
      { role: "developer", content: "be brief" },
      { role: "user", content: [{ type: "text", text: "hi" }] },
    ];
    const request = { messages, max_completion_tokens: 3 };
    const reply = await ask(url, "chat/completions", request);
    expect(await reply.json()).toMatchObject({
      object: "chat.completion",
      model: "tiny",
      system_fingerprint: "tiny-numerics",
      choices: [{ index: 0, message: { role: "assistant", content: "aaa" }, finish_reason: "length", logprobs: null }],
      usage: { prompt_tokens: "developer:be brief;user:hi;>".length, completion_tokens: 3, total_tokens: 31 },
    });
    const events = await eventsOf(await ask(url, "chat/completions", { ...request, stream: true }));
    expect(events[0]!.choices[0]!.delta).toMatchObject({ role: "assistant", content: "" });
    expect(events.at(-1)!.choices[0]).toMatchObject({ delta: {}, finish_reason: "length" });
    expect(textsOf(events)).toEqual(["aaa"]);
    expect("usage" in events[0]!).toBe(false);
  });

  test("takes what the context has left unless told otherwise", async () => {
    const { url } = await startNode({ token: A, textModel });
    const reply = await ask(url, "chat/completions", chatOf("x".repeat(20)));
    const prompt = "user:;>".length + 20;
    expect(await reply.json()).toMatchObject({
      choices: [{ message: { content: "a".repeat(CONTEXT - prompt) }, finish_reason: "length" }],
    });
  });

  test("tells logprobs with the tokens' bytes", async () => {
    const { url } = await startNode({ token: 0xf0, textModel });
    const reply = await ask(url, "chat/completions", chatOf("hi", { max_tokens: 1, logprobs: true, top_logprobs: 2 }));
    const { choices } = (await reply.json()) as { choices: { logprobs: unknown; message: { content: string } }[] };
    expect(choices[0]!.message.content).toBe("\ufffd");
    expect(choices[0]!.logprobs).toEqual({
      content: [
        {
          token: "bytes:\\xf0",
          logprob: -0.5,
          bytes: [0xf0],
          top_logprobs: [
            { token: "bytes:\\xf0", logprob: 0, bytes: [0xf0] },
            { token: "bytes:\\xf1", logprob: -1, bytes: [0xf1] },
          ],
        },
      ],
      refusal: null,
    });
  });

  test("of a model without a template is refused with a way out", async () => {
    const { url } = await startNode();
    const reply = await ask(url, "chat/completions", chatOf("hi"));
    expect(reply.status).toBe(400);
    expect((await openAiErrorOf(reply)).message).toMatch(/no chat template.*\/v1\/completions/);
  });

  test("with tools that must not be used tells the template of them", async () => {
    const tools = [{ type: "function", function: { name: "f" } }];
    using folder = temporaryFolder();
    writeFileSync(join(folder.path, "chat_template.jinja"), "{{ tools[0].function.name }}>");
    const chatTemplate = ChatTemplate.load(folder.path, tinyTokenizer);
    const { url } = await startNode({ token: A, textModel: { chatTemplate } });
    const reply = await ask(url, "chat/completions", chatOf("hi", { tools, tool_choice: "none", max_tokens: 1 }));
    expect(await reply.json()).toMatchObject({ usage: { prompt_tokens: 2 } });
  });
});

const COMPLETION: [object, string, string | null][] = [
  [{ prompt: "x", temperature: 2.5 }, "temperature", "invalid_value"],
  [{ prompt: "x", temperature: "1" }, "temperature", "invalid_value"],
  [{ prompt: "x", top_p: 0 }, "top_p", "invalid_value"],
  [{ prompt: "x", top_p: 1.1 }, "top_p", "invalid_value"],
  [{ prompt: "x", top_k: 1.5 }, "top_k", "invalid_value"],
  [{ prompt: "x", min_p: -1 }, "min_p", "invalid_value"],
  [{ prompt: "x", repetition_penalty: 0 }, "repetition_penalty", "invalid_value"],
  [{ prompt: "x", seed: 0.5 }, "seed", "invalid_value"],
  [{ prompt: "x", n: 0 }, "n", "invalid_value"],
  [{ prompt: "x", n: 129 }, "n", "invalid_value"],
  [{ prompt: "x", max_tokens: -1 }, "max_tokens", "invalid_value"],
  [{ prompt: "x", logprobs: 21 }, "logprobs", "invalid_value"],
  [{ prompt: "x", stop: ["a", "b", "c", "d", "e"] }, "stop", "invalid_value"],
  [{ prompt: "x", stop: "" }, "stop", "invalid_value"],
  [{ prompt: "x", stop: [1] }, "stop", "invalid_value"],
  [{ prompt: "x", stream: "yes" }, "stream", "invalid_value"],
  [{ prompt: "x", stream_options: { include_usage: true } }, "stream_options", "invalid_value"],
  [{ prompt: "x", stop_token_ids: [-1] }, "stop_token_ids", "invalid_value"],
  [{ prompt: "x", best_of: 2 }, "best_of", "unsupported_value"],
  [{ prompt: "x", suffix: "y" }, "suffix", "unsupported_value"],
  [{ prompt: "x", logit_bias: { 5: 1 } }, "logit_bias", "unsupported_value"],
  [{ prompt: "x", frequency_penalty: 0.1 }, "frequency_penalty", "unsupported_value"],
  [{ prompt: "x", presence_penalty: 0.1 }, "presence_penalty", "unsupported_value"],
  [{ prompt: "x", response_format: { type: "json_object" } }, "response_format", "unsupported_value"],
  [{}, "prompt", "invalid_value"],
  [{ prompt: [] }, "prompt", "empty_prompt"],
  [{ prompt: [[]] }, "prompt", "empty_prompt"],
  [{ prompt: "", add_special_tokens: false }, "prompt", "empty_prompt"],
  [{ prompt: [["x"]] }, "prompt", "invalid_value"],
  [{ prompt: [1, 256] }, "prompt", "invalid_value"],
  [{ prompt: [1, -1] }, "prompt", "invalid_value"],
  [{ prompt: "x".repeat(CONTEXT) }, "prompt", "context_length_exceeded"],
  [{ prompt: "x".repeat(100_000) }, "prompt", "context_length_exceeded"],
  [{ prompt: "x", max_tokens: CONTEXT - 1 }, "prompt", "context_length_exceeded"],
];

const CHAT: [object, string, string | null][] = [
  [{}, "messages", "invalid_value"],
  [{ messages: [] }, "messages", "invalid_value"],
  [{ messages: [{ role: "user; system", content: "x" }] }, "messages", "invalid_value"],
  [chatOf([{ type: "image_url", image_url: { url: "data:," } }]), "messages", "unsupported_value"],
  [chatOf("x", { max_tokens: 0 }), "max_tokens", "invalid_value"],
  [chatOf("x", { max_completion_tokens: 0 }), "max_completion_tokens", "invalid_value"],
  [chatOf("x", { top_logprobs: 1 }), "top_logprobs", "invalid_value"],
  [chatOf("x", { logprobs: true, top_logprobs: 21 }), "top_logprobs", "invalid_value"],
  [chatOf("x", { logprobs: 1 }), "logprobs", "invalid_value"],
  [chatOf("x", { tools: [{}] }), "tools", "unsupported_value"],
  [chatOf("x", { functions: [{}] }), "functions", "unsupported_value"],
  [chatOf("x", { modalities: ["text", "audio"] }), "modalities", "unsupported_value"],
  [chatOf("x".repeat(CONTEXT)), "messages", "context_length_exceeded"],
  [chatOf("x".repeat(100_000)), "messages", "context_length_exceeded"],
];

describe("what cannot be is refused by name, and reaches no device:", () => {
  test("in a completion", async () => {
    const { url, stage } = await startNode();
    for (const [body, param, code] of COMPLETION) {
      const reply = await ask(url, "completions", body);
      expect([JSON.stringify(body).slice(0, 60), reply.status]).toEqual([expect.any(String), 400]);
      expect(await openAiErrorOf(reply)).toEqual({
        message: expect.any(String),
        type: "invalid_request_error",
        param,
        code,
      });
    }
    expect(stage.calls).toBe(0);
  });

  test("in a chat", async () => {
    const { url, stage } = await startNode({ textModel });
    for (const [body, param, code] of CHAT) {
      const reply = await ask(url, "chat/completions", body);
      expect(reply.status).toBe(400);
      expect(await openAiErrorOf(reply)).toMatchObject({ type: "invalid_request_error", param, code });
    }
    expect(stage.calls).toBe(0);
  });

  test.each([
    ["no JSON", "{", 400, "invalid_value"],
    ["JSON that is no object", "[]", 400, "invalid_value"],
    ["17 MiB", "x".repeat(17 << 20), 413, "too_large"],
    ["another model", { model: "gpt-4o", prompt: "x" }, 404, "model_not_found"],
  ])("%s", async (_, body, status, code) => {
    const { url } = await startNode();
    const reply = await ask(url, "completions", body);
    expect(reply.status).toBe(status);
    expect(await openAiErrorOf(reply)).toMatchObject({ code, type: "invalid_request_error" });
    expect(reply.headers.get("x-request-id")).not.toBeNull();
  });

  test("while parameters that mean nothing here, and nulls, are passed over", async () => {
    const { url } = await startNode({ token: A });
    const harmless = { user: "me", metadata: { a: "b" }, logit_bias: {}, presence_penalty: 0, best_of: 1, store: true };
    const nulls = { stop: null, temperature: null, max_tokens: null, logprobs: null, n: null, suffix: null };
    const reply = await complete(url, { model: "tiny", prompt: "x", ...harmless, ...nulls });
    expect(reply.choices[0]!.text).toBe("a".repeat(16));
  });
});

describe("GET /v1/models", () => {
  test("has the one model, by its id and alone", async () => {
    const { url } = await startNode();
    const get = (path: string) => fetch(new URL(path, url));
    const model = { id: "tiny", object: "model", created: expect.any(Number), owned_by: "meshnet" };
    expect(await (await get("v1/models")).json()).toEqual({ object: "list", data: [model] });
    expect(await (await get("v1/models/tiny")).json()).toEqual(model);
    const other = await get("v1/models/org/other");
    expect([other.status, (await openAiErrorOf(other)).code]).toEqual([404, "model_not_found"]);
  });
});

describe("a node that cannot answer", () => {
  test("for it is not the head, says who can", async () => {
    const { url } = await startNode({ start: 2 });
    const reply = await ask(url, "completions", { prompt: "x" });
    expect(reply.status).toBe(404);
    expect((await openAiErrorOf(reply)).message).toMatch(/the head/);
  });

  test("for the chain ends too early, says so with 503", async () => {
    const { url } = await startNode({ end: 2 });
    const reply = await ask(url, "completions", { prompt: "x" });
    expect(reply.status).toBe(503);
    expect(reply.headers.get("retry-after")).not.toBeNull();
    expect(await openAiErrorOf(reply)).toMatchObject({ type: "server_error", code: "not_ready" });
  });

  test("for its next node is not there, says so with 503", async () => {
    const { url } = await startNode({ end: 2, next: "http://127.0.0.1:1/", eager: true });
    const reply = await ask(url, "completions", { prompt: "x" });
    expect([reply.status, (await openAiErrorOf(reply)).code]).toEqual([503, "not_ready"]);
  });

  test("for a later node fails, names that failure in OpenAI's shape", async () => {
    let isLost = false;
    const lose = () => {
      if (isLost) throw deviceLost();
    };
    const tail = await startNode({ start: 2, gate: lose });
    const head = await startNode({ end: 2, next: tail.url });
    await until(async () => (await fetch(new URL("health/ready", head.url))).ok);
    isLost = true;
    const reply = await ask(head.url, "completions", { prompt: "x" });
    expect(reply.status).toBe(503);
    expect(await openAiErrorOf(reply)).toEqual({
      message: "the device is gone; restart the node",
      type: "server_error",
      param: null,
      code: "device_lost",
    });
  });

  test("for it is called by a web page, or by another method, says so in OpenAI's shape", async () => {
    const { url } = await startNode();
    const page = await ask(url, "completions", { prompt: "x" }, { headers: { Origin: "https://example.org" } });
    expect([page.status, (await openAiErrorOf(page)).type]).toEqual([403, "permission_error"]);
    const method = await fetch(new URL("v1/completions", url));
    expect([method.status, (await openAiErrorOf(method)).code]).toEqual([405, "method_not_allowed"]);
  });

  test("for it is stopping, finishes the streams that run and takes no other", async () => {
    const { wait, open } = gate();
    const node = await startNode({ token: A, gate: wait });
    const running = ask(node.url, "completions", { prompt: "hi", max_tokens: 3, stream: true });
    await until(() => node.stage.calls > 0);
    const stopped = node.stop();
    const refused = await ask(node.url, "completions", { prompt: "hi" });
    expect([refused.status, (await openAiErrorOf(refused)).code]).toEqual([503, "draining"]);
    open();
    expect(textsOf(await eventsOf(await running))).toEqual(["aaa"]);
    await stopped;
  });
});

describe("room", () => {
  const LONG = "x".repeat(29); // with the 0 before it and 10 more tokens: all of the 10 pages

  test("is waited for while other texts run, in the order in which they came", async () => {
    const { wait, open } = gate();
    const tail = await startNode({ start: 2, token: A, pages: 10 });
    const head = await startNode({ end: 2, next: tail.url, pages: 10, gate: wait });
    await until(async () => (await ask(head.url, "completions", { prompt: "x", max_tokens: 0 })).ok);
    const order: number[] = [];
    const asked = [0, 1, 2, 3].map(async (number) => {
      await Bun.sleep(30 * number);
      const { choices } = await complete(head.url, { prompt: LONG, max_tokens: 10 });
      order.push(number);
      return choices[0]!.text;
    });
    await Bun.sleep(150);
    open();
    expect(await Promise.all(asked)).toEqual(Array(4).fill("a".repeat(10)));
    expect(order).toEqual([0, 1, 2, 3]);
    await until(() => head.stage.cacheUse.sessions + tail.stage.cacheUse.sessions === 0);
  });

  test("that somebody else has is not waited for: 429, and when to ask again", async () => {
    const { url } = await startNode({ pages: 10 });
    const session = { "X-Meshnet-Session": "other", "X-Meshnet-Step": "1", "X-Meshnet-Max-Len": "40" };
    const held = await post(url, "hi", "text/plain", { ...session, "X-Meshnet-Pos-Start": "0" });
    expect(held.status).toBe(200);
    for (const echo of [false, true]) {
      const reply = await ask(url, "completions", { prompt: LONG, max_tokens: 10, stream: true, echo });
      expect(reply.status).toBe(429);
      expect(reply.headers.get("retry-after")).not.toBeNull();
      expect(await openAiErrorOf(reply)).toMatchObject({ type: "rate_limit_error", code: "rate_limit_exceeded" });
    }
  });

  test("is waited for by a few only", async () => {
    const { wait, open } = gate();
    const node = await startNode({ token: A, pages: 10, gate: wait, limits: { maxWaiting: 2 } });
    const request = { prompt: LONG, max_tokens: 10 };
    const running = [1, 2, 3].map(() => complete(node.url, request));
    await until(() => node.stage.calls > 0);
    await Bun.sleep(20);
    const reply = await ask(node.url, "completions", request);
    expect([reply.status, (await openAiErrorOf(reply)).code]).toEqual([429, "rate_limit_exceeded"]);
    open();
    await Promise.all(running);
  });

  test("goes to the next one where a caller that waits goes away", async () => {
    const { wait, open } = gate();
    const node = await startNode({ token: A, pages: 10, gate: wait });
    const request = { prompt: LONG, max_tokens: 10 };
    const first = complete(node.url, request);
    await until(() => node.stage.calls > 0);
    const control = new AbortController();
    const second = ask(node.url, "completions", request, { signal: control.signal });
    await Bun.sleep(20);
    const third = complete(node.url, request);
    control.abort();
    await expect(second).rejects.toThrow();
    open();
    expect((await first).choices[0]!.text).toBe((await third).choices[0]!.text);
  });
});

describe("a client that goes away", () => {
  const idle = (nodes: readonly TinyNode[]) =>
    nodes.every(({ app, stage }) => app.runner.sessions === 0 && stage.cacheUse.sessions === 0);

  /** Aborts a call once `when` holds, and gives the milliseconds until no node has a session of it. */
  async function leave(nodes: readonly TinyNode[], body: object, when: () => boolean): Promise<number> {
    const control = new AbortController();
    const call = ask(nodes[0]!.url, "completions", body, { signal: control.signal }).then((reply) => reply.text());
    call.catch(() => {});
    await until(when);
    control.abort();
    const left = performance.now();
    await until(() => idle(nodes));
    return performance.now() - left;
  }

  test.each([true, false])(
    "in prefill or before the first byte frees its session everywhere (stream: %p)",
    async (stream) => {
      const { wait, open } = gate();
      let isClosed = false;
      const tail = await startNode({ start: 2, gate: () => (isClosed ? wait() : undefined) });
      const head = await startNode({ end: 2, next: tail.url });
      await until(async () => (await fetch(new URL("health/ready", head.url))).ok);
      isClosed = true;
      const took = leave([head, tail], { prompt: "hello", stream }, () => tail.app.runner.sessions === 1);
      await until(() => tail.app.runner.sessions === 1);
      await until(() => tail.app.runner.sessions + head.app.runner.sessions === 0);
      open(); // what is on the device ends by itself
      expect(await took).toBeLessThan(1000);
    },
  );

  test.each([true, false])(
    "in decode frees its sessions everywhere, those of all choices (stream: %p)",
    async (stream) => {
      const nodes = await chain({ gate: () => Bun.sleep(5) });
      const body = { prompt: "hello", max_tokens: 30, n: 3, temperature: 1, stream };
      const isDecoding = () => nodes[1].stage.steps > 8 && nodes[1].app.runner.sessions === 3;
      expect(await leave(nodes, body, isDecoding)).toBeLessThan(1000);
      const steps = nodes[0].stage.steps;
      await Bun.sleep(50);
      expect(nodes[0].stage.steps).toBe(steps);
    },
  );

  test("frees its session at once where only the stream's end tells that it is gone, before the first token", async () => {
    const { wait, open } = gate();
    const node = await startNode({ gate: wait, timing: { heartbeatMs: 20 } });
    // Not over a connection: this request's signal never says a word.
    const body = JSON.stringify({ prompt: "hello", max_tokens: 10, stream: true });
    const headers = { Host: new URL(node.url).host };
    const reply = await node.app.fetch(new Request(`${node.url}v1/completions`, { method: "POST", headers, body }));
    const reader = reply.body!.getReader();
    expect(new TextDecoder().decode((await reader.read()).value)).toBe(": still working\n\n");
    expect(node.app.runner.sessions).toBe(1);
    await reader.cancel();
    await until(() => node.app.runner.sessions === 0); // and the layers still run
    open();
    await until(() => idle([node]));
  });

  test("is no bug in the log, and what it asked is not in there", async () => {
    const lines: string[] = [];
    const log = createLogger({ level: "debug", format: "text", write: (line) => lines.push(line) });
    const node = await startNode({ gate: () => Bun.sleep(5), log });
    await leave([node], { prompt: "SECRET", max_tokens: 30, stream: true }, () => node.stage.steps > 3);
    await ask(node.url, "completions", { prompt: "SECRET", temperature: 9 });
    expect(lines.join("\n")).toContain("call refused");
    expect(lines.join("\n")).not.toMatch(/SECRET| error |a bug/);
  });
});

describe("a stream", () => {
  test("whose first token takes long is kept alive by comments, and tells a late failure as its last event", async () => {
    const { wait, open } = gate();
    let isBroken = false;
    const node = await startNode({
      gate: async () => {
        await wait();
        if (isBroken) throw deviceLost();
      },
      timing: { heartbeatMs: 20 },
    });
    const reply = await ask(node.url, "completions", { prompt: "hi", stream: true });
    expect(reply.status).toBe(200);
    await Bun.sleep(100);
    isBroken = true;
    open();
    const blocks = await blocksOf(reply);
    expect(blocks.slice(0, -1).filter((block) => block.startsWith(":")).length).toBeGreaterThan(2);
    expect(JSON.parse(blocks.at(-1)!.slice("data: ".length))).toEqual({
      error: {
        message: "the device is gone; restart the node",
        type: "server_error",
        param: null,
        code: "device_lost",
      },
    });
    await until(() => node.stage.cacheUse.sessions === 0);
  });

  test("has the same text beside 15 others as alone", async () => {
    const [head] = await chain({ textModel, gate: () => Bun.sleep(1) });
    const answer = async (number: number) => {
      const how = { max_tokens: 12, temperature: 1, seed: 31 * number, logprobs: true, top_logprobs: 1, stream: true };
      const reply = await ask(head.url, "chat/completions", chatOf(`${7 * number} times`, how));
      return JSON.stringify((await eventsOf(reply)).flatMap(({ choices }) => choices));
    };
    const alone: string[] = [];
    for (let number = 0; number < 16; number++) alone.push(await answer(number));
    expect(new Set(alone).size).toBe(16);
    const widest = head.stage.widest;
    expect(await Promise.all(alone.map((_, number) => answer(number)))).toEqual(alone);
    expect(head.stage.widest).toBeGreaterThan(widest);
  });
});
