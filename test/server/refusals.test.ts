import { afterAll, beforeEach, describe, expect, test } from "bun:test";
import { createLogger } from "../../src/base/log.ts";
import { ask, openAiErrorOf } from "./openai-calls.ts";
import { CONTEXT, startNode, until, VOCAB } from "./tiny-node.ts";

const lines: string[] = [];
beforeEach(() => void lines.splice(0));
const log = createLogger({ level: "debug", format: "text", write: (line) => lines.push(line) });
const head = await startNode({ start: 0, end: 4, log });
afterAll(() => head.stop());

async function refusal(body: string, headers: Record<string, string> = {}): Promise<Record<string, string>> {
  const init = { method: "POST", headers: { "Content-Type": "text/plain", ...headers }, body };
  const reply = await fetch(`${head.url}forward`, init);
  return ((await reply.json()) as { error: Record<string, string> }).error;
}

describe("the log of a refused call", () => {
  test.each([
    ["completions", { prompt: "x".repeat(CONTEXT), max_tokens: 9 }, 400, "context_length_exceeded"],
    ["completions", { prompt: [] }, 400, "empty_prompt"],
    ["completions", { prompt: "a", temperature: 9 }, 400, "invalid_value"],
    ["completions", { prompt: "a", logit_bias: { 1: 1 } }, 400, "unsupported_value"],
    ["completions", { prompt: "a", model: "other" }, 404, "model_not_found"],
  ])("has the code and the status that the caller of /v1/%s got: %p", async (path, body, status, code) => {
    const reply = await ask(head.url, path, body);
    expect(reply.status).toBe(status);
    expect((await openAiErrorOf(reply)).code).toBe(code);
    const line = lines.find((text) => text.includes("call refused"));
    expect(line).toMatch(new RegExp(`code=${code}\\b.* status=${status}\\b`));
  });

  test("of /forward has that route's own", async () => {
    expect((await refusal("x".repeat(CONTEXT))).code).toBe("context_exceeded");
    expect(lines.join("\n")).toMatch(/call refused .*code=context_exceeded status=422/);
  });

  test("tells of the end of a session that the node never had only where everything is told", async () => {
    expect((await fetch(`${head.url}sessions/never`, { method: "DELETE" })).status).toBe(404);
    expect((await fetch(`${head.url}nowhere`, { method: "DELETE" })).status).toBe(404);
    await until(() => lines.length >= 2);
    expect(lines.map((line) => /(debug|info ) +call refused/.exec(line)?.[1]?.trim())).toEqual(["debug", "info"]);
  });
});

describe("a refusal says what the caller can do", () => {
  test.each([undefined, null])("where the prompt is %p", async (prompt) => {
    const { message } = await openAiErrorOf(await ask(head.url, "completions", { prompt }));
    expect(message).toStartWith("prompt is missing; send a text");
  });

  test("where a step is more than a float64 holds", async () => {
    const { message, hint } = await refusal("a", {
      "X-Meshnet-Session": "big",
      "X-Meshnet-Step": "1152921504606846976",
    });
    expect(message).toBe('header X-Meshnet-Step is "1152921504606846976"');
    expect(hint).toBe("give a whole number from 0 to 2^53 - 1");
    const { message: seed } = await openAiErrorOf(
      await ask(head.url, "completions", '{"prompt":"a","seed":9223372036854775808}'),
    );
    expect(seed).toStartWith("seed is about 9.223e+18, and seed is a whole number from -(2^53 - 1) to 2^53 - 1");
    const { message: most } = await openAiErrorOf(
      await ask(head.url, "completions", '{"prompt":"a","max_tokens":1e17}'),
    );
    expect(most).toContain("a whole number from 0 to 2^53 - 1");
  });

  test("where a number is none any more", async () => {
    const { message } = await refusal("a", { "X-Meshnet-Sampling": '{"temperature":1e999}' });
    expect(message).toBe("header X-Meshnet-Sampling has temperature Infinity, and temperature is a number from 0");
  });

  test("where more room is asked for than a sequence may have, rather than more tokens sent", async () => {
    const room = { "X-Meshnet-Session": "room", "X-Meshnet-Step": "1", "X-Meshnet-Max-Len": `${CONTEXT + 9}` };
    expect((await refusal("a", room)).hint).toStartWith(`ask for room for at most ${CONTEXT} tokens`);
    expect((await refusal("x".repeat(CONTEXT), { ...room, "X-Meshnet-Max-Len": "5" })).hint).toBe("send fewer tokens");
  });

  const OTHERS: Record<string, string>[] = [{ "X-Meshnet-Want": "logits" }, { "X-Meshnet-Sampling": '{"seed":2}' }];
  test.each(OTHERS)("where a step comes again with something else in it: %p", async (other) => {
    const session = { "X-Meshnet-Session": `again${Object.keys(other)[0]!.length}`, "X-Meshnet-Step": "1" };
    const init = { method: "POST", headers: { "Content-Type": "text/plain", ...session }, body: "a" };
    expect((await fetch(`${head.url}forward`, init)).status).toBe(200);
    const { code, message } = await refusal("a", { ...session, ...other });
    expect(code).toBe("step_conflict");
    expect(message).toEndWith("had other tokens, another start, want or sampling");
  });

  test("where nothing is at a path: the routes as the documents have them", async () => {
    const reply = await fetch(`${head.url}v1/v1/completions`, { method: "POST" });
    const { message } = await openAiErrorOf(reply);
    expect(message).toStartWith("there is no /v1/v1/completions; ");
    expect(message).toContain("GET /v1/models/{id}");
    expect(message).toContain("DELETE /sessions/{id}");
    expect(message).not.toContain(":id");
  });

  test("where a token that is to end the text is not in the vocabulary", async () => {
    const sampling = { "X-Meshnet-Sampling": `{"stop_token_ids":[1,${VOCAB}]}` };
    const { code, message } = await refusal("a", sampling);
    expect(code).toBe("token_id");
    expect(message).toBe(`row 0 has ${VOCAB} in its stop_token_ids, and the vocabulary is 0 to ${VOCAB - 1}`);
    const asked = await ask(head.url, "completions", { prompt: "a", stop_token_ids: [VOCAB] });
    expect(await openAiErrorOf(asked)).toMatchObject({
      param: "stop_token_ids",
      message: expect.stringContaining(`the token id ${VOCAB}, and this model's go from 0 to ${VOCAB - 1}`),
    });
    expect((await ask(head.url, "completions", { prompt: "a", stop_token_ids: [VOCAB - 1] })).status).toBe(200);
  });
});
