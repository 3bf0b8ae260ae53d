import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { CONTEXT, LAYERS, startNode, type TinyNode } from "../server/tiny-node.ts";

const INDEX = join(import.meta.dir, "../../src/index.ts");
/** Room for more than the usual 64 tokens. */
const LONG = 100;

let short: TinyNode;
let long: TinyNode;
/** Passes the API of `short` on, and nothing else. */
let proxy: ReturnType<typeof Bun.serve>;
beforeAll(async () => {
  short = await startNode({ start: 0, end: LAYERS });
  long = await startNode({ start: 0, end: LAYERS, maxContext: LONG });
  proxy = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    async fetch(request) {
      const { pathname } = new URL(request.url);
      if (!pathname.startsWith("/v1/")) return new Response("", { status: 404 });
      const body = await request.text();
      return fetch(new URL(pathname, short.url), { method: "POST", body });
    },
  });
});
afterAll(async () => {
  await proxy.stop(true);
  await Promise.all([short, long].map((node) => node.stop()));
});

/** The prompt is so many tokens: one for each letter, and one before them. */
async function generate(tokens: number, url: string, ...words: string[]) {
  const command = [process.execPath, INDEX, "generate", "a".repeat(tokens - 1), "--head", url, "--json", "--quiet"];
  const child = Bun.spawn([...command, ...words], {
    env: { PATH: process.env.PATH },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  const code = await child.exited;
  const usage = code === 0 ? (JSON.parse(stdout) as { usage: object }).usage : undefined;
  return { code, stderr, usage };
}

test.each([
  ["64 tokens where the context has room for them", 10, () => long.url, 64],
  ["64 tokens where just as many are left", LONG - 64, () => long.url, 64],
  ["what the context has left where that is less", LONG - 63, () => long.url, 63],
  ["what a short context has left", 10, () => short.url, CONTEXT - 10],
  ["the last token that there is room for", CONTEXT - 1, () => short.url, 1],
  ["what the head makes by itself where nobody tells its context", 10, () => proxy.url.href, 16],
])("without --max-new-tokens, meshnet generate makes %s", async (_, prompt, url, made) => {
  expect(await generate(prompt, url())).toEqual({
    code: 0,
    stderr: "",
    usage: { prompt_tokens: prompt, completion_tokens: made, cached_tokens: expect.any(Number) },
  });
});

test("a number of tokens that the context has no room for is an error, with the number that it has", async () => {
  const { code, stderr } = await generate(10, short.url, "--max-new-tokens", "31");
  expect({ code, stderr }).toEqual({
    code: 1,
    stderr: expect.stringMatching(/ 10 and 31 are to follow\n.* at most 30 /),
  });
  expect((await generate(10, short.url, "--max-new-tokens", "30")).code).toBe(0);
});

test.each([CONTEXT, CONTEXT + 1, 65537 + 64 * CONTEXT])(
  "a prompt of %d tokens, after which none are left, is an error without a number that nobody gave",
  async (tokens) => {
    const { code, stderr } = await generate(tokens, short.url);
    expect({ code, stderr }).toEqual({ code: 1, stderr: expect.stringMatching(/context is 40 tokens[^]*shorte/) });
    expect(stderr).not.toContain("to follow");
  },
);
