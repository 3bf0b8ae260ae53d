import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import type { NodeInfo } from "../../src/protocol/info.ts";
import { softwareDevices } from "../support/device.ts";
import { GPT2_124M, writeEmptyGpt2 } from "../support/empty-gpt2.ts";
import { NodeProcess } from "../support/meshnet.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

// The slowest one that is here: a pass of a long prompt takes it tens of seconds.
const device = softwareDevices.findLast(({ adapter }) => adapter !== undefined);

test.skipIf(!device)(
  "a node that all callers of long prompts have hung up on stops at once, in the middle of their pass",
  async () => {
    const directory = writeEmptyGpt2(join(folder.path, "gpt2"), GPT2_124M);
    await using node = new NodeProcess(["--model-id", directory, "--device", device!.adapter!]);
    const url = await node.url;
    const info = async () => (await (await fetch(`${url}info`)).json()) as NodeInfo;
    const gone = new AbortController();
    const body = JSON.stringify({ input_ids: [Array.from({ length: 1024 }, (_, i) => i)] });
    const headers = { "Content-Type": "application/json", "X-Meshnet-Route": "local" };
    const calls = [1, 2, 3, 4].map(() =>
      fetch(`${url}forward`, { method: "POST", headers, body, signal: gone.signal }).catch(() => "gone"),
    );
    while ((await info()).cache!.sessions < 4) await Bun.sleep(10);
    const { passes } = (await info()).work!;
    gone.abort();
    expect(await Promise.all(calls)).toEqual(Array(4).fill("gone"));
    const began = performance.now();
    expect(await node.stop()).toBe(0);
    expect(performance.now() - began).toBeLessThan(5_000);
    expect(passes).toBeLessThan(4);
  },
  120_000,
);
