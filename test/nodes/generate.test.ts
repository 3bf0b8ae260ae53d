import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { MESHNET, run, spawn, startChain, untilFree } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { writeEndlessModel, writeScriptedModel } from "../support/scripted-model.ts";

const { greedy } = JSON.parse(readFileSync(join(TINY, "oracle.json"), "utf8"));
const PROMPT: string = greedy.prompts.free;
const CONTINUATION: string = greedy.continuations["free.fp32"];

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** Characters of two, three and four bytes, each byte a token of its own. */
const MULTI_BYTE = "Grüße, 你好，世界 🙂👩‍🚀 — конец\n";
const scripted = join(folder.path, "scripted");
writeScriptedModel(scripted, MULTI_BYTE);
const endless = join(folder.path, "endless");
writeEndlessModel(endless, "und so weiter, ");

const own = (model: string, ...words: string[]) => ["generate", "--model-id", model, "--log-level", "error", ...words];

/** Runs the binary, does something when the first text has come, and gives the chunks in which it came. */
async function runUntilText(words: string[], then: (child: ReturnType<typeof spawn>) => unknown) {
  const child = spawn(words);
  const chunks: Uint8Array[] = [];
  const stderr = new Response(child.stderr).text();
  for await (const chunk of child.stdout) {
    if (chunks.push(chunk) === 1) await then(child);
  }
  const utf8 = new TextDecoder("utf-8", { fatal: true });
  return { code: await child.exited, texts: chunks.map((chunk) => utf8.decode(chunk)), stderr: await stderr };
}

describe("one process that holds the whole model", () => {
  test("writes transformers' text, and how fast it came to stderr alone", async () => {
    const { code, stdout, stderr } = await run(own(TINY, PROMPT, "--max-new-tokens", "64"));
    expect({ code, stdout }).toEqual({ code: 0, stdout: `${PROMPT}${CONTINUATION}\n` });
    expect(stderr).toMatch(/^64 tokens, the first after [\d.]+ s, then [\d.]+ tokens\/s\n$/);
  }, 60_000);

  test("gives one JSON object with --json", async () => {
    const { code, stdout } = await run(own(TINY, PROMPT, "--max-new-tokens", "16", "--json"));
    expect({ code, lines: stdout.split("\n").length }).toEqual({ code: 0, lines: 2 });
    const { text, timing, ...rest } = JSON.parse(stdout);
    expect(rest).toEqual({
      model: TINY,
      prompt: PROMPT,
      finish_reason: "length",
      usage: { prompt_tokens: 5, completion_tokens: 16, cached_tokens: 0 },
    });
    expect(CONTINUATION).toStartWith(text);
    expect(timing.first_token_ms).toBeGreaterThan(0);
    expect(timing.total_ms).toBeGreaterThan(timing.first_token_ms);
    const rate = 15_000 / (timing.total_ms - timing.first_token_ms);
    expect(Math.abs(timing.tokens_per_second / rate - 1)).toBeLessThan(0.1); // of rounded times
  }, 60_000);

  test("never shows a part of a character, though each byte is a token", async () => {
    const words = own(scripted, "a", "--max-new-tokens", "200");
    const { code, texts } = await runUntilText(words, () => {}); // each chunk is UTF-8 by itself, or this throws
    expect({ code, text: texts.join("") }).toEqual({ code: 0, text: `a${MULTI_BYTE}\n` });
    expect(texts.length).toBeGreaterThan(3); // it did come in pieces
    expect(texts.join("")).not.toContain("\ufffd");
  }, 60_000);

  test("reads prompts from stdin and from files, without the last line break", async () => {
    const file = join(folder.path, "prompt.txt");
    writeFileSync(file, `${PROMPT}\n`);
    const tokens = ["--max-new-tokens", "8", "--quiet"];
    const fromFile = await run(own(TINY, "--prompt-file", file, ...tokens));
    const fromStdin = await run(own(TINY, "-", ...tokens), { stdin: new Blob([`${PROMPT}\r\n`]) });
    expect({ code: fromFile.code, stderr: fromFile.stderr }).toEqual({ code: 0, stderr: "" });
    expect(`${PROMPT}${CONTINUATION}`).toStartWith(fromFile.stdout.slice(0, -1));
    expect(fromFile.stdout.length).toBeGreaterThan(PROMPT.length + 8);
    expect(fromStdin).toEqual(fromFile);
  }, 60_000);

  test("ends before each of several stop strings, whichever comes first", async () => {
    const stops = ["--stop", "never, ever", "--stop=redistribute"];
    const { stdout } = await run(own(TINY, PROMPT, ...stops, "--max-new-tokens", "40"));
    expect(stdout).toBe(`${PROMPT}${CONTINUATION.split("redistribute")[0]}\n`);
  }, 60_000);

  test("draws the same text with the same seed, another one with another", async () => {
    const drawn = async (seed: string) =>
      (await run(own(TINY, PROMPT, "--seed", seed, "--temperature", "1.5", "--quiet"))).stdout;
    const [first, again, other] = [await drawn("7"), await drawn("7"), await drawn("8")];
    expect(again).toBe(first);
    expect(other).not.toBe(first);
    expect(first).not.toStartWith(`${PROMPT}${CONTINUATION}`.slice(0, 80));
  }, 60_000);

  test("draws where the model's generation_config.json says so, unless it is told not to", async () => {
    const drawing = join(folder.path, "drawing");
    cpSync(TINY, drawing, { recursive: true });
    // So hot that any token is about as likely as any other: two texts that are equal are a chance of one in a million.
    const config = { do_sample: true, temperature: 100, top_k: 0, eos_token_id: 1023 };
    writeFileSync(join(drawing, "generation_config.json"), JSON.stringify(config));
    const draw = async () => (await run(own(drawing, PROMPT, "--quiet", "--max-new-tokens", "40"))).stdout;
    expect(await draw()).not.toBe(await draw());
    const { stdout: likeliest } = await run(own(drawing, PROMPT, "--temperature", "0", "--max-new-tokens", "40"));
    expect(`${PROMPT}${CONTINUATION}`).toStartWith(likeliest.trimEnd());
  }, 60_000);

  test("stops at Ctrl-C, and exits as shells expect it", async () => {
    const words = own(endless, "a", "--max-new-tokens", "4000");
    const { code, texts, stderr } = await runUntilText(words, (child) => child.kill("SIGINT"));
    const text = texts.join("");
    expect({ code, stderr }).toEqual({ code: 130, stderr: expect.stringMatching(/^stopped, the first after/) });
    expect(text).toEndWith("\n");
    expect(text.length).toBeLessThan(4000);
  }, 60_000);
});

describe("with a chain of two nodes", () => {
  test("Ctrl-C frees both nodes within a second", async () => {
    await using chain = await startChain(endless, [2, 4]);
    let freeMs = Infinity;
    const words = ["generate", "a", "--head", chain.head, "--max-new-tokens", "4000"];
    const { code, texts } = await runUntilText(words, async (child) => {
      child.kill("SIGINT");
      freeMs = await untilFree(chain.nodes);
    });
    expect({ code, isShort: texts.join("").length < 4000 }).toEqual({ code: 130, isShort: true });
    expect(freeMs).toBeLessThan(1000);
  }, 60_000);

  test("a head that dies in the middle is an error, on a line of its own", async () => {
    await using chain = await startChain(endless, [2, 4]);
    const words = ["generate", "a", "--head", chain.head, "--max-new-tokens", "4000"];
    const { code, texts, stderr } = await runUntilText(words, () => chain.nodes[0]!.stop("SIGKILL"));
    expect({ code, text: texts.join("") }).toEqual({ code: 1, text: expect.stringMatching(/^au[^\n]*\n$/) });
    expect(stderr).toMatch(/^meshnet: the head .* is gone: it broke off in the middle of the text/);
  }, 60_000);

  test("a tail that dies in the middle is told by the head", async () => {
    await using chain = await startChain(endless, [2, 4]);
    const words = ["generate", "a", "--head", chain.head, "--max-new-tokens", "4000"];
    const { code, stderr } = await runUntilText(words, () => chain.nodes[1]!.stop("SIGKILL"));
    expect({ code, stderr }).toEqual({ code: 1, stderr: expect.stringMatching(/^meshnet: the head answers: /) });
  }, 60_000);

  test("a reader that has enough (| head) is no error", async () => {
    await using chain = await startChain(endless, [2, 4]);
    const line = `'${MESHNET}' generate a --head ${chain.head} --max-new-tokens 4000 | head -c 20`;
    const child = Bun.spawn(["sh", "-c", line], { stdio: ["ignore", "pipe", "pipe"] });
    const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
    expect({ stdout, stderr }).toEqual({ stdout: "aund so weiter, und ", stderr: "" });
  }, 60_000);

  test("a flag on the command line wins over a node's in the environment", async () => {
    await using chain = await startChain(TINY, [4]);
    const env = { MESHNET_MODEL_ID: "/nonexistent", MESHNET_DEVICE: "voodoo", MESHNET_OFFLINE: "1" };
    const { code, stdout } = await run(["generate", PROMPT, "--head", chain.head], { env });
    expect({ code, stdout: `${PROMPT}${CONTINUATION}\n`.startsWith(stdout.trimEnd()) }).toEqual({
      code: 0,
      stdout: true,
    });
  }, 60_000);

  test("a node that is not the head says so", async () => {
    await using chain = await startChain(TINY, [2, 4]);
    const { code, stderr } = await run(["generate", "a", "--head", await chain.nodes[1]!.url]);
    expect({ code, stderr }).toEqual({
      code: 1,
      stderr: expect.stringMatching(
        /^meshnet: the node at \S+ is no head: it has the layers 2-4 of 4\n {2}ask the head/,
      ),
    });
  }, 60_000);

  test("a prompt that does not fit says both numbers and what would", async () => {
    await using chain = await startChain(TINY, [4]);
    const words = ["generate", "a b ".repeat(100), "--head", chain.head, "--max-new-tokens", "100"];
    const { code, stdout, stderr } = await run(words);
    expect({ code, stdout }).toEqual({ code: 1, stdout: "" });
    expect(stderr).toMatch(/the context is 256 tokens; the prompt has \d+ and 100 are to follow\n {2}\S/);
  }, 60_000);
});

test("--quiet leaves warnings away, such as that of a software device, unless a level is asked for", async () => {
  const words = ["generate", "--model-id", TINY, "a", "--max-new-tokens", "2", "--quiet"];
  const { code, stderr } = await run(words);
  expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
  expect((await run([...words, "--log-level", "info"])).stderr).not.toBe("");
}, 30_000);

test("a file that is not there exits with 1, and is named once", async () => {
  const { code, stderr } = await run(own(TINY, "--prompt-file", "/no/such/file"));
  expect({ code, stderr }).toEqual({
    code: 1,
    stderr: "meshnet: --prompt-file /no/such/file cannot be read: there is no such file\n  give a file of text\n",
  });
});

test("an error about a flag of the environment names the variable", async () => {
  const { code, stderr } = await run(own(TINY, "a"), { env: { MESHNET_TEMPERATURE: "9", MESHNET_TOP_K: "3" } });
  expect({ code, stderr }).toEqual({
    code: 2,
    stderr: expect.stringMatching(/--temperature 9 is more than 2\n.*MESHNET_TEMPERATURE\n$/),
  });
  const typed = await run(own(TINY, "a", "--temperature", "9"), { env: { MESHNET_TEMPERATURE: "1" } });
  expect(typed.stderr).not.toContain("MESHNET");
});

describe("wrong usage exits with 2 before a model is loaded:", () => {
  const latin1 = join(folder.path, "latin1.txt");
  writeFileSync(latin1, Buffer.from("caf\xe9", "latin1"));
  test.each([
    ["no prompt", own(TINY), /there is no prompt[^]*--prompt-file/],
    ["two prompts", own(TINY, "a", "--prompt-file", "b"), /both a prompt and --prompt-file/],
    ["a file that is no UTF-8", own(TINY, "--prompt-file", latin1), /latin1\.txt is not text in UTF-8/],
    ["two models", own(TINY, "a", "--head", "http://127.0.0.1:1"), /both --head and --model-id/],
    [
      "a node's flag for a chain",
      ["generate", "a", "--head", "http://127.0.0.1:1", "--max-context", "9"],
      /--max-context/,
    ],
    ["a temperature that is no number", own(TINY, "a", "--temperature", "hot"), /--temperature hot is not a number/],
    ["a temperature that heads refuse", own(TINY, "a", "--temperature", "3"), /--temperature 3 is more than 2/],
    ["a probability above 1", own(TINY, "a", "--top-p", "1.5"), /--top-p is 1\.5.*above 0, up to 1/],
    ["a part of a token", own(TINY, "a", "--top-k", "0.5"), /--top-k is 0\.5.*whole number/],
    ["no tokens", own(TINY, "a", "--max-new-tokens", "0"), /--max-new-tokens 0/],
    ["five stops", own(TINY, "a", ...Array(5).fill("--stop=x")), /--stop is given 5 times/],
    ["a stop without a text", own(TINY, "a", "--stop", "x", "--stop"), /--stop needs a value/],
  ])("%s", async (_, words, says) => {
    const { code, stdout, stderr } = await run(words);
    expect({ code, stdout, stderr }).toEqual({ code: 2, stdout: "", stderr: expect.stringMatching(says) });
  });
});
