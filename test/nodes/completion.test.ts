import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { NodeProcess, run, type RunOptions, startChain } from "../support/meshnet.ts";
import { Oracle, TINY } from "../support/oracle.ts";

const { greedy } = JSON.parse(readFileSync(join(TINY, "oracle.json"), "utf8"));
const oracle = new Oracle(TINY);
const PROMPT: string = greedy.prompts.free;
const TEXT: string = PROMPT + greedy.continuations["free.fp32"];

/** `mount` is the superuser's. */
const isRoot = process.getuid?.() === 0;
const READ_ONLY_TMP = [
  "unshare",
  "--mount",
  "sh",
  "-c",
  'mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && exec "$0" "$@"',
];

const complete = async (head: string, tokens: number, options?: RunOptions) =>
  run(["generate", PROMPT, "--head", head, "--max-new-tokens", `${tokens}`], options);

test("two nodes of the compiled binary, run from another directory, write transformers' text", async () => {
  await using chain = await startChain(TINY, [2, 4]);
  const stderr = expect.stringMatching(/^64 tokens, the first after [\d.]+ s, then [\d.]+ tokens\/s\n$/);
  expect(await complete(chain.head, 64)).toEqual({ code: 0, stdout: `${TEXT}\n`, stderr });
}, 120_000);

test.skipIf(!isRoot)(
  "so they do where /tmp is read-only (needs the superuser)",
  async () => {
    await using chain = await startChain(TINY, [2, 4], { wrapper: READ_ONLY_TMP });
    const { code, stdout } = await complete(chain.head, 16, { wrapper: READ_ONLY_TMP });
    expect({
      code,
      isBeginning: TEXT.startsWith(stdout.trimEnd()),
      length: stdout.length > PROMPT.length + 20,
    }).toEqual({
      code: 0,
      isBeginning: true,
      length: true,
    });
  },
  120_000,
);

test("so they do where no Vulkan driver is to be seen, with the bundled one, which they say loudly", async () => {
  const env = { VK_DRIVER_FILES: "/nonexistent.json", VK_ICD_FILENAMES: "/nonexistent.json" };
  await using chain = await startChain(TINY, [2, 4], { env });
  const { code, stdout } = await complete(chain.head, 16);
  expect({ code, isBeginning: TEXT.startsWith(stdout.trimEnd()), length: stdout.length > PROMPT.length + 20 }).toEqual({
    code: 0,
    isBeginning: true,
    length: true,
  });
  for (const node of chain.nodes) expect(node.log).toMatch(/warn.*software_device.*SwiftShader.*slower/);
}, 180_000);

test("one, two, three and four nodes answer with the same logits, bit for bit", async () => {
  const ids = [...oracle.ints("middle.input_ids")];
  const answers: string[] = [];
  for (const ends of [[4], [1, 4], [1, 2, 4], [1, 2, 3, 4]]) {
    await using chain = await startChain(TINY, ends);
    const reply = await fetch(`${chain.head}forward`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-meshnet-want": "all_logits" },
      body: JSON.stringify({ input_ids: [ids, ids.slice(0, 3)] }),
    });
    expect({ ends, status: reply.status, shape: reply.headers.get("x-meshnet-shape") }).toEqual({
      ends,
      status: 200,
      shape: `2,${ids.length},1024`,
    });
    answers.push(Bun.SHA256.hash(await reply.arrayBuffer(), "hex"));
  }
  expect(new Set(answers).size).toBe(1);
}, 180_000);

test("a completion ends where the model says so", async () => {
  await using chain = await startChain(TINY, [4]);
  const { stdout } = await run(["generate", greedy.prompts.stops, "--head", chain.head]);
  expect(stdout).toBe(`${greedy.prompts.stops}${greedy.continuations["stops.fp32"].replace("<|endoftext|>", "")}\n`);
}, 120_000);

test("nodes of different encodings form a chain, and each says its own", async () => {
  await using tail = new NodeProcess([
    "--model-id",
    TINY,
    "--shard-start",
    "2",
    "--quantization",
    "int8",
    "--int8-activations",
  ]);
  await using head = new NodeProcess([
    "--model-id",
    TINY,
    "--shard-end",
    "2",
    "--quantization",
    "nf4",
    "--next",
    await tail.url,
  ]);
  const url = await head.ready();
  const { code, stdout } = await complete(url, 24);
  expect({ code, isBeginning: TEXT.startsWith(stdout.trimEnd()) }).toEqual({ code: 0, isBeginning: true });
  const said = await Promise.all([url, await tail.url].map(async (node) => (await fetch(`${node}info`)).json()));
  expect(said).toMatchObject([{ quantization: "nf4" }, { quantization: "int8" }]);
}, 120_000);
