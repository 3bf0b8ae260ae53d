import { afterAll, describe, expect, test } from "bun:test";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { hostMemory } from "../../src/gpu/host-memory.ts";
import type { NodeInfo } from "../../src/protocol/info.ts";
import { softwareDevices } from "../support/device.ts";
import { GPT2_124M, writeEmptyGpt2 } from "../support/empty-gpt2.ts";
import { NodeProcess, run } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

describe.skipIf(!device)(`a node with 124 million parameters and 256 MiB (${device?.name ?? "no device here"})`, () => {
  const directory = writeEmptyGpt2(join(folder.path, "gpt2"), GPT2_124M);
  const flags = ["--model-id", directory, "--device", device?.adapter ?? "cpu", "--memory-limit", "256MiB"];
  let suggestions: string[][] = [];

  test("is refused within 2 seconds, with exit code 3, what needs what, what there is, and what would fit", async () => {
    const began = performance.now();
    const { code, stdout, stderr } = await run(["node", ...flags, "--port", "0"]);
    expect(performance.now() - began).toBeLessThan(2000);
    expect([code, stdout]).toEqual([3, ""]);
    const refusal = stderr.slice(stderr.indexOf("meshnet: "));
    expect(refusal.split("\n").length).toBeLessThan(30);
    expect(refusal).toMatch(/^meshnet: layers 0-12 need \d+\.\d MiB on the device, and --memory-limit is 256\.0 MiB\n/);
    for (const row of [
      /^ {2}weights +layers 0-12, bfloat16 +162\.0 MiB$/m,
      /^ {2}weights +embeddings and head, bfloat16 +73\.6 MiB$/m,
      /^ {2}kv cache +4 × 1024 tokens +144\.0 MiB$/m,
      /^ {2}activations .* MiB$/m,
      /^ {2}staging .* MiB$/m,
      /^ {2}driver +the driver's compiler and compiled kernels .* MiB$/m,
      /^ {2}driver +reserve .* MiB$/m,
      /has \d+\.\d [GM]iB free of \d+\.\d [GM]iB \(memory of the (machine|cgroup .*)\)$/m,
      /--memory-limit.* 256\.0 MiB$/m,
    ])
      expect(refusal).toMatch(row);
    expect(refusal).not.toMatch(/[ \t]$/m);
    suggestions = Array.from(refusal.matchAll(/^ {4}(--.*?) {2}\(/gm), ([, words]) => words!.split(" "));
    expect(suggestions.length).toBe(3);
    expect(suggestions.at(-1)).toEqual(["--memory-limit", expect.stringMatching(/^44\d(\.\d)?MiB$/)]);
    expect(suggestions[0]![0]).toBe("--shard-end");
    expect(suggestions.flat()).toContain("nf4");
  });

  test("starts with each change that was suggested, and serves", async () => {
    expect(suggestions.length).toBeGreaterThan(0);
    for (const words of suggestions.filter(([flag]) => flag !== "--memory-limit")) {
      await using node = new NodeProcess([...flags, ...words]);
      const url = await node.ready();
      const { memory } = (await (await fetch(`${url}info`)).json()) as NodeInfo;
      expect(memory.allocated).toBeWithin(1, 256 * 2 ** 20);
      expect(memory.available).toBe(256 * 2 ** 20 - memory.allocated);
      const body = JSON.stringify({ input_ids: [[1, 2, 3]] });
      const headers = { "Content-Type": "application/json", "X-Meshnet-Want": "none" };
      expect((await fetch(`${url}forward`, { method: "POST", headers, body })).ok).toBe(true);
    }
  }, 120_000);
});

/** NF4 takes the compilers most; the others are in the long tests. */
const NF4 = ["--quantization", "nf4"];
const ENCODINGS = process.env["LONG_TESTS"] ? [[], NF4, ["--quantization", "int8", "--int8-activations"]] : [NF4];

describe.each(softwareDevices.map((one) => [one.name, one.adapter] as const))("a node on %s", (name, adapter) => {
  test.skipIf(process.platform !== "linux" || adapter === undefined).each(ENCODINGS.map((flags) => [flags]))(
    "takes no more of the machine's memory than it said it needs, its kernels compiled for the first time: %j",
    async (flags) => {
      const env = { MESA_SHADER_CACHE_DISABLE: "true" };
      await using node = new NodeProcess(["--model-id", TINY, "--device", adapter!, ...flags], { env });
      let needed: RegExpExecArray | null;
      while (!(needed = / memory needed="([\d.]+) MiB"/.exec(node.log))) await Bun.sleep(1);
      const before = memoryOf(node.pid, "VmRSS");
      const url = await node.ready();
      const headers = { "Content-Type": "application/json" };
      const ask = (rows: number, tokens: number) =>
        fetch(`${url}forward`, {
          method: "POST",
          headers,
          body: JSON.stringify({ input_ids: Array.from({ length: rows }, () => Array(tokens).fill(rows)) }),
        });
      const replies = await Promise.all([ask(1, 200), ask(2, 100), ask(4, 256), ask(6, 20)]);
      expect(replies.map(({ status }) => status)).toEqual([200, 200, 200, 200]);
      const grown = memoryOf(node.pid, "VmHWM") - before;
      console.log({ device: name, flags, neededMiB: Number(needed[1]), grownMiB: Math.round(grown / 2 ** 20) });
      expect(grown).toBeLessThan(Number(needed[1]) * 2 ** 20);
    },
    120_000,
  );
});

describe.skipIf(process.platform !== "linux" || !device)("two nodes that start at the same time", () => {
  const directory = writeEmptyGpt2(join(folder.path, "twice"), GPT2_124M);

  test("are promised the memory of the machine once: one serves, the other is refused and says why", async () => {
    // As if a third node had been promised all but 900 MiB, of which each of the two needs 572.
    const temporary = join(folder.path, "tmp");
    const claimed = join(temporary, `meshnet-${process.getuid!()}`);
    mkdirSync(claimed, { recursive: true, mode: 0o700 });
    const startTime = readFileSync("/proc/self/stat", "utf8")
      .replace(/^.*\) /s, "")
      .split(" ")[19]!;
    const bytes = hostMemory("/", []).availableBytes - 900 * 2 ** 20;
    const heldBytes = Number.MAX_SAFE_INTEGER; // it takes none of it meanwhile
    writeFileSync(join(claimed, `${process.pid}.claim`), JSON.stringify({ bytes, heldBytes, startTime }));

    const start = () =>
      new NodeProcess(["--model-id", directory, "--device", device!.adapter!], { env: { TMPDIR: temporary } });
    await using one = start();
    await using other = start();
    const ends = await Promise.all(
      [one, other].map((node) => node.ready().then(() => "serves", () => node.exited)), // prettier-ignore
    );
    expect(ends.map(String).toSorted()).toEqual(["3", "serves"]);
    const { log } = ends[0] === "serves" ? other : one;
    expect(log).toMatch(/need 571\.7 MiB[^]*\(memory of the .*, less \d+\.\d [GM]iB that other nodes were promised\)/);
  }, 60_000);
});

/** A field of a process's status, in bytes. */
function memoryOf(pid: number, field: "VmRSS" | "VmHWM"): number {
  const status = readFileSync(`/proc/${pid}/status`, "utf8");
  return Number(new RegExp(`${field}:\\s+(\\d+) kB`).exec(status)![1]) * 1024;
}

test("a dry run shows the same rows, and sums", async () => {
  const { code, stdout } = await run(["node", "--model-id", TINY, "--dry-run", "--quantization", "int8"]);
  expect(code).toBe(0);
  expect(stdout).toMatch(/^weights +layers 0-4, int8 +\d/m);
  expect(stdout).toMatch(/^kv cache +4 × 256 tokens +\d/m);
  expect(stdout).toMatch(/^loading +the largest matrix in bfloat16, while it is quantized +\d/m);
  expect(stdout).toMatch(/for good, .* while it loads/);
});

const TINY_FLAGS = ["node", "--model-id", TINY, "--dry-run"];

describe("a dry run", () => {
  test("says whether the node would fit, and does not end well where it would not", async () => {
    const bad = await run([...TINY_FLAGS, "--memory-limit", "10MiB"]);
    expect(bad.code).toBe(3);
    const problem = /layers 0-4 need \d+\.\d MiB on the device, and --memory-limit is 10\.0 MiB/;
    expect(bad.stdout).toMatch(/^kv cache +4 × 256 tokens/m);
    expect(bad.stdout.trimEnd().split("\n").at(-1)).toMatch(new RegExp(`^does not fit: ${problem.source}$`));
    expect(bad.stderr).toMatch(problem);
    expect(bad.stderr).toMatch(/^ {4}--memory-limit \d+(\.\d)?MiB {2}\(raise .* or leave it away\)$/m);
    const good = await run([...TINY_FLAGS, "--memory-limit", "64MiB"]);
    expect([good.code, good.stderr]).toEqual([0, ""]);
    expect(good.stdout).toMatch(/\nfits: /);
  }, 30_000);

  test("does not take a device that is not there", async () => {
    const { code, stdout, stderr } = await run([...TINY_FLAGS, "--device", "nonsense"]);
    expect([code, stdout]).toEqual([1, ""]);
    expect(stderr).toContain('"nonsense"');
  });

  test.skipIf(process.platform !== "linux")(
    "is no more permitted below a ulimit -v than the node is, and both say so at once",
    async () => {
      const wrapper = ["sh", "-c", 'ulimit -v 3000000; exec "$@"', "sh"];
      for (const words of [TINY_FLAGS, ["node", "--model-id", TINY, "--port", "0"]]) {
        const { code, stderr } = await run(words, { wrapper });
        expect(code).toBe(3);
        expect(stderr).toMatch(/ulimit -v gives this process 2\.9 GiB[^]*ulimit -v unlimited/);
      }
    },
    30_000,
  );
});

test.each(["8GX", "-1", "1.5", "lots", "0", "1e9"])(
  "--memory-limit %s is refused with what a size looks like",
  async (size) => {
    const { code, stderr } = await run(["node", "--model-id", TINY, `--memory-limit=${size}`]);
    expect(code).toBe(2);
    expect(stderr).toMatch(/--memory-limit .* is not a size[^]*8GiB/);
  },
);
