import { expect, test } from "bun:test";
import type { ServeBenchmark } from "../../src/mesh/bench-serve.ts";
import { run, spawn, startChain } from "../support/meshnet.ts";
import { TINY, variant } from "../support/oracle.ts";

const SMALL = ["--sessions", "1,3", "--tokens", "6", "--prompt-tokens", "5", "--prefill-tokens", "900", "--runs", "2"];
const bench = (...words: string[]) => run(["bench", "serve", "--log-level", "error", ...words]);

function expectConsistent({ alone, sessions, prefill }: ServeBenchmark): void {
  expect(alone.firstTokenMs).toHaveLength(2);
  expect(alone.tokens).toBeGreaterThanOrEqual(2);
  expect(alone.tokens).toBeLessThanOrEqual(2 * 6);
  expect(alone.passMs!).toBeGreaterThan(0);
  expect(alone.passMs!).toBeLessThan(alone.wallMs);
  expect(sessions.map(({ sessions: count }) => count)).toEqual([1, 3]);
  for (const one of sessions) {
    expect(one.tokens).toBeGreaterThanOrEqual(6 * one.sessions);
    expect(one.tokensPerSecond).toBeCloseTo(one.tokens / one.seconds, 6);
    expect(one.perTokenMs.count).toBe(one.tokens);
    expect(one.firstTokenMs.count).toBe(one.sessions);
    // So many sessions cannot have had more tokens than their times make up.
    expect(one.perTokenMs.max).toBeLessThanOrEqual(one.seconds * 1000);
  }
  expect(prefill.promptTokens).toBe(255); // gpt2-tiny has 256 positions
  expect(prefill.besideMs.count).toBeGreaterThan(0);
  expect(prefill.idleMs.count).toBeGreaterThanOrEqual(6);
  const all = [prefill.idleMs, prefill.besideMs, ...sessions.flatMap((one) => [one.perTokenMs, one.firstTokenMs])];
  for (const { p50, p99, max } of all) expect([p50, p99, max]).toEqual([p50, p99, max].toSorted((a, b) => a - b));
}

test("bench serve measures a model that it holds, and its numbers go together", async () => {
  const { code, stdout, stderr } = await bench(...SMALL, "--model-id", TINY, "--json");
  expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
  const measured = JSON.parse(stdout);
  expect(measured).toMatchObject({ model: TINY, nodes: [{ layers: "0-4 of 4", quantization: "bfloat16" }] });
  expectConsistent(measured);
}, 60_000);

test("it measures a chain from outside, says how, and leaves nothing behind", async () => {
  await using chain = await startChain(TINY, [2, 4]);
  const measured: ServeBenchmark = JSON.parse((await bench(...SMALL, "--head", chain.head, "--json")).stdout);
  expect(measured.nodes.map(({ layers }) => layers)).toEqual(["0-2 of 4", "2-4 of 4"]);
  expectConsistent(measured);
  const { code, stdout } = await bench(...SMALL, "--head", chain.head);
  expect(code).toBe(0);
  for (const said of [
    /^method +POST \/v1\/completions, streamed, greedy; prompts of 5 random token ids/m,
    /^first token +[\d.]+ m?s/m,
    /^1 at a time +[\d.]+ tokens\/s in all +time per token p50 [\d.]+ m?s, p99 [\d.]+ m?s/m,
    /^3 at a time /m,
    /^long prompt +255 tokens read in/m,
    /p99 is [\d.]+ × that \(goal: at most 3\)/,
    /^overhead +-?[\d.]+ ms per token beside the passes/m,
  ]) {
    expect(stdout).toMatch(said);
  }
  const info = await (await fetch(`${chain.head}info`)).json();
  expect(info).toMatchObject({ cache: { reserved_pages: 0, sessions: 0 } });
}, 60_000);

test("as many at a time as the head has room for are measured where nobody says how many", async () => {
  await using chain = await startChain(TINY, [4]);
  const words = ["--head", chain.head, "--tokens", "20", "--prompt-tokens", "100", "--runs", "1", "--json"];
  const { code, stdout } = await bench(...words);
  const { sessions }: ServeBenchmark = JSON.parse(stdout);
  expect({ code, counts: sessions.map((one) => one.sessions) }).toEqual({ code: 0, counts: [1, 4, 6] }); // of 160 tokens, in 1024
}, 60_000);

test("what cannot be measured is said with a way out", async () => {
  await using chain = await startChain(TINY, [4]);
  const many = await bench("--head", chain.head, "--sessions", "64", "--tokens", "40");
  expect({ code: many.code, stderr: many.stderr }).toEqual({
    code: 2,
    stderr: expect.stringMatching(/64 texts of 96 tokens.*the head has 1024\n.*at most 10 --sessions.*--max-sessions/),
  });
  const long = await bench("--head", chain.head, "--prompt-tokens", "255");
  expect({ code: long.code, stderr: long.stderr }).toEqual({
    code: 2,
    stderr: expect.stringMatching(/--prompt-tokens 255.*the context is 256/),
  });
  const headless = await bench("--model-id", variant("bf16"));
  expect({ code: headless.code, stderr: headless.stderr }).toEqual({
    code: 1,
    stderr: expect.stringMatching(/tokenizer/),
  });
  expect((await run(["bench", "serve"])).code).toBe(2);
}, 60_000);

test("Ctrl-C ends it", async () => {
  const child = spawn(["bench", "serve", "--model-id", TINY, "--tokens", "100"]);
  let log = "";
  for await (const chunk of child.stderr.pipeThrough(new TextDecoderStream())) {
    log += chunk;
    if (log.includes("measuring")) child.kill("SIGINT");
  }
  expect(await child.exited).toBe(130);
  expect(log).not.toContain("a bug");
}, 60_000);
