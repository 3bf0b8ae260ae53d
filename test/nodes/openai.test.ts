import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import OpenAI, { APIUserAbortError, BadRequestError, NotFoundError, RateLimitError } from "openai";
import { type Chain, NodeProcess, startChain, takenPages, untilFree } from "../support/meshnet.ts";
import { Oracle, TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { writeEndlessModel } from "../support/scripted-model.ts";

/** The official client, as users call it. */
const clientOf = (url: string, maxRetries = 0) => new OpenAI({ baseURL: `${url}v1`, apiKey: "none", maxRetries });

/** gpt2-tiny has no chat template: this one is as plain as can be. */
const TEMPLATE =
  "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
const folder = temporaryFolder();
const CHATTY = join(folder.path, "chatty");
cpSync(TINY, CHATTY, { recursive: true });
writeFileSync(join(CHATTY, "chat_template.jinja"), TEMPLATE);
const ENDLESS = join(folder.path, "endless");
writeEndlessModel(ENDLESS, "on and on, ");
afterAll(() => folder[Symbol.dispose]());

const { greedy } = JSON.parse(readFileSync(join(TINY, "oracle.json"), "utf8"));
const PROMPT: string = greedy.prompts.free;
const CONTINUATION: string = greedy.continuations["free.fp32"];
const oracle = new Oracle(TINY);

const model = "chatty";
const GREEDY = { model, temperature: 0 } as const;

let chain: Chain;
let client: OpenAI;
beforeAll(async () => {
  chain = await startChain(CHATTY, [2, 4]);
  client = clientOf(chain.head);
}, 120_000);
afterAll(() => chain[Symbol.asyncDispose]());

const chat = (content: string) => [{ role: "user" as const, content }];

describe("the official client, against two nodes of the compiled binary,", () => {
  test("lists the model and gets it by its id and its short name", async () => {
    const models = await Array.fromAsync(client.models.list());
    expect(models.map(({ id }) => id)).toEqual([CHATTY]);
    expect((await client.models.retrieve(model)).id).toBe(CHATTY);
    expect((await client.models.retrieve(CHATTY)).id).toBe(CHATTY);
  });

  test("gets transformers' text, whole and streamed", async () => {
    const request = { ...GREEDY, prompt: PROMPT, max_tokens: 40 };
    const whole = await client.completions.create(request);
    const text = whole.choices[0]!.text;
    expect(text.length).toBeGreaterThan(40);
    expect(CONTINUATION).toStartWith(text);
    expect(whole._request_id).not.toBeNull();
    const stream = await client.completions.create({
      ...request,
      stream: true,
      stream_options: { include_usage: true },
    });
    const chunks = await Array.fromAsync(stream);
    expect(chunks.map(({ choices }) => choices[0]?.text ?? "").join("")).toBe(text);
    expect(chunks.at(-1)!.usage).toMatchObject({ completion_tokens: 40 });
    expect(chunks.at(-1)!.usage!.prompt_tokens).toBe(whole.usage!.prompt_tokens);
  });

  test("chats, and its streaming helper puts the same answer together", async () => {
    const request = { ...GREEDY, messages: chat(PROMPT), max_tokens: 60, stop: ["License"] };
    const whole = await client.chat.completions.create({ ...request, logprobs: true, top_logprobs: 3 });
    const { message, finish_reason, logprobs } = whole.choices[0]!;
    expect(message.role).toBe("assistant");
    expect(message.content).not.toContain("License");
    expect(finish_reason).toBe("stop");
    // The last token, " License", begins before the cut.
    expect(logprobs!.content!.map(({ token }) => token).join("")).toBe(`${message.content}License`);
    for (const { token, logprob, bytes, top_logprobs } of logprobs!.content!) {
      expect(Buffer.from(bytes!).toString()).toBe(token);
      expect(top_logprobs).toHaveLength(3);
      expect(logprob).toBe(top_logprobs[0]!.logprob); // greedy: the likeliest one, or one that equals it
    }
    const final = await client.chat.completions.stream(request).finalChatCompletion();
    expect(final.choices[0]!.message.content).toBe(message.content);
    expect(final.choices[0]!.finish_reason).toBe("stop");
  });

  test("gets the text before a stop string that tokens have parts of, in pieces that never show a part of it", async () => {
    const [before] = CONTINUATION.split("redistribute") as [string];
    expect(before.length).toBeLessThan(CONTINUATION.length);
    const request = { ...GREEDY, prompt: PROMPT, max_tokens: 40, stop: ["never", "redistribute"] };
    const whole = await client.completions.create(request);
    expect(whole.choices[0]).toMatchObject({ text: before, finish_reason: "stop" });
    let text = "";
    for await (const { choices } of await client.completions.create({ ...request, stream: true })) {
      text += choices[0]!.text;
      expect(before).toStartWith(text);
    }
    expect(text).toBe(before);
  });

  test("gets n texts that differ, and the same ones again with the same seed", async () => {
    const request = { model, messages: chat("The licence says"), n: 3, seed: 11, max_tokens: 12 };
    const texts = async () => {
      const { choices } = await client.chat.completions.create(request);
      return choices.map(({ message }) => message.content);
    };
    const first = await texts();
    expect(new Set(first).size).toBe(3);
    expect(await texts()).toEqual(first);
  });

  test("gets a prompt's logprobs as transformers has them", async () => {
    const ids = [...oracle.ints("middle.input_ids")];
    const request = { ...GREEDY, prompt: ids, max_tokens: 0, echo: true, logprobs: 1 };
    const { choices, usage } = await client.completions.create(request);
    const { tokens, token_logprobs, text_offset } = choices[0]!.logprobs!;
    const logits = oracle.floats("middle.fp32.logits");
    const vocab = logits.length / ids.length;
    const expected = ids.slice(1).map((id, at) => {
      const row = logits.subarray(at * vocab, (at + 1) * vocab);
      return row[id]! - Math.log(row.reduce((sum, value) => sum + Math.exp(value), 0));
    });
    expect(token_logprobs![0]).toBeNull();
    const off = expected.map((value, at) => Math.abs(token_logprobs![at + 1]! - value));
    expect(Math.max(...off)).toBeLessThan(0.1); // logits are bfloat16, whose steps are 1/16 at their size
    expect(tokens!.join("")).toBe(choices[0]!.text);
    expect(text_offset![2]).toBe(tokens![0]!.length + tokens![1]!.length);
    expect(usage).toMatchObject({ prompt_tokens: ids.length, completion_tokens: 0 });
  });

  test("uses what the chain knows of a prompt already", async () => {
    const prompt = `${PROMPT} ${"a b c d e f g h ".repeat(10)}`;
    const first = await client.completions.create({ ...GREEDY, prompt, max_tokens: 4 });
    const second = await client.completions.create({ ...GREEDY, prompt, max_tokens: 4 });
    expect(second.usage!.prompt_tokens_details!.cached_tokens).toBeGreaterThan(0);
    expect(second.choices[0]!.text).toBe(first.choices[0]!.text);
  });

  test("sees special tokens that a message spells as ordinary text", async () => {
    const tokens = async (content: string) => {
      const { usage } = await client.chat.completions.create({ ...GREEDY, messages: chat(content), max_tokens: 1 });
      return usage!.prompt_tokens;
    };
    expect((await tokens("<|endoftext|>")) - (await tokens(""))).toBeGreaterThan(3);
    const { usage } = await client.completions.create({ ...GREEDY, prompt: "<|endoftext|>", max_tokens: 1 });
    expect(usage!.prompt_tokens).toBe(1); // the caller's own text is read as transformers does
  });

  test("gets every impossible wish as its typed exception", async () => {
    const wishes: [OpenAI.CompletionCreateParamsNonStreaming, object][] = [
      [
        { model, prompt: "x ".repeat(300) },
        { code: "context_length_exceeded", param: "prompt" },
      ],
      [
        { model, prompt: "x", max_tokens: 256 },
        { code: "context_length_exceeded", param: "prompt" },
      ],
      [
        { model, prompt: "x", temperature: 3 },
        { code: "invalid_value", param: "temperature" },
      ],
      [
        { model, prompt: "x", logit_bias: { 5: 1 } },
        { code: "unsupported_value", param: "logit_bias" },
      ],
    ];
    for (const [wish, shape] of wishes) {
      const error = await client.completions.create(wish).catch((reason: unknown) => reason);
      expect(error).toBeInstanceOf(BadRequestError);
      expect(error).toMatchObject({ status: 400, type: "invalid_request_error", ...shape });
    }
    const other = await client.completions.create({ model: "gpt-4o", prompt: "x" }).catch((reason: unknown) => reason);
    expect(other).toBeInstanceOf(NotFoundError);
    expect(other).toMatchObject({ code: "model_not_found", param: "model" });
    const tail = clientOf(await chain.nodes[1]!.url);
    await expect(Array.fromAsync(tail.models.list())).rejects.toThrow(/the head/);
  });

  test("abandons a stream, or gives up before the first byte, and both nodes are free within a second", async () => {
    await using endless = await startChain(ENDLESS, [2, 4]);
    const { chat: answers, completions } = clientOf(endless.head);
    const request = { model: "endless", temperature: 0 } as const;
    const stream = await answers.completions.create({ ...request, messages: chat("go on"), stream: true, n: 2 });
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 6) break;
    expect(await untilFree(endless.nodes)).toBeLessThan(1000);

    const control = new AbortController();
    const wish = { ...request, prompt: "of the ".repeat(100), max_tokens: 3000 };
    const ended = completions.create(wish, { signal: control.signal }).catch((reason: unknown) => reason);
    while ((await takenPages(endless.nodes)).some((pages) => pages === 0)) await Bun.sleep(1);
    control.abort();
    expect(await ended).toBeInstanceOf(APIUserAbortError);
    expect(await untilFree(endless.nodes)).toBeLessThan(1000);
  }, 60_000);

  test("streams 16 answers at once, each with the text that it has alone", async () => {
    const answer = async (number: number) => {
      const request = { model, messages: chat(`Tell me of ${number}`), seed: number, max_tokens: 12 };
      let text = "";
      for await (const { choices } of await client.chat.completions.create({ ...request, stream: true })) {
        text += choices[0]!.delta.content ?? "";
      }
      return text;
    };
    const alone: string[] = [];
    for (let number = 0; number < 16; number++) alone.push(await answer(number));
    expect(new Set(alone).size).toBeGreaterThan(8);
    expect(await Promise.all(alone.map((_, number) => answer(number)))).toEqual(alone);
  }, 60_000);

  test("gets more chats than there is room for, one after the other", async () => {
    // Each may take the whole context, and there is room for four such.
    const chats = Array.from({ length: 6 }, (_, number) =>
      client.chat.completions.create({ ...GREEDY, messages: chat(`Chat ${number}`), stop: ["a"] }),
    );
    for (const { choices } of await Promise.all(chats)) expect(choices[0]!.finish_reason).not.toBeNull();
    expect(await untilFree(chain.nodes)).toBeLessThan(1000);
  }, 60_000);
});

describe("a node by itself,", () => {
  test("whose model has no chat template, says so; and where somebody else has its room, when to ask again", async () => {
    await using node = new NodeProcess(["--model-id", TINY, "--max-sessions", "1"]);
    const url = await node.ready();
    const alone = clientOf(url);
    const request = { model: "gpt2-tiny", messages: chat("hi") };
    const refusal = await alone.chat.completions.create(request).catch((reason: unknown) => reason);
    expect(refusal).toBeInstanceOf(BadRequestError);
    expect((refusal as BadRequestError).message).toMatch(/no chat template.*\/v1\/completions/);

    const headers = { "content-type": "text/plain", "x-meshnet-session": "mine", "x-meshnet-step": "1" };
    await fetch(`${url}forward`, { method: "POST", headers: { ...headers, "x-meshnet-pos-start": "0" }, body: "hi" });
    const wish = { model: "gpt2-tiny", prompt: "hi", max_tokens: 200 };
    const error = await alone.completions.create(wish).catch((reason: unknown) => reason);
    expect(error).toBeInstanceOf(RateLimitError);
    expect((error as RateLimitError).headers!.get("retry-after")).not.toBeNull();
    await fetch(`${url}sessions/mine`, { method: "DELETE" });
    expect((await alone.completions.create(wish)).choices[0]!.text.length).toBeGreaterThan(0);
  }, 120_000);
});
