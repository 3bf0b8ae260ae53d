import { afterAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
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
    expect(suggestions.length).toBeWithin(2, 4);
    expect(suggestions[0]![0]).toBe("--shard-end");
    expect(suggestions.flat()).toContain("nf4");
  });

  test("starts with each change that was suggested, and serves", async () => {
    expect(suggestions.length).toBeGreaterThan(0);
    for (const words of suggestions) {
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

test("a dry run shows the same rows, and sums", async () => {
  const { code, stdout } = await run(["node", "--model-id", TINY, "--dry-run", "--quantization", "int8"]);
  expect(code).toBe(0);
  expect(stdout).toMatch(/^weights +layers 0-4, int8 +\d/m);
  expect(stdout).toMatch(/^kv cache +4 × 256 tokens +\d/m);
  expect(stdout).toMatch(/^loading +the largest matrix in bfloat16, while it is quantized +\d/m);
  expect(stdout).toMatch(/for good, .* while it loads/);
});

test.each(["8GX", "-1", "1.5", "lots", "0", "1e9"])(
  "--memory-limit %s is refused with what a size looks like",
  async (size) => {
    const { code, stderr } = await run(["node", "--model-id", TINY, `--memory-limit=${size}`]);
    expect(code).toBe(2);
    expect(stderr).toMatch(/--memory-limit .* is not a size[^]*8GiB/);
  },
);
