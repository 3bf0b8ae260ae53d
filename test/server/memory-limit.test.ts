import { afterAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { byteSize } from "../../src/cli/units.ts";
import { silentLogger } from "../../src/base/log.ts";
import type { NodeInfo } from "../../src/protocol/info.ts";
import { startNode } from "../../src/server/node.ts";
import { type NodeConfig, QUANTIZATIONS, type Quantization } from "../../src/server/plan-node.ts";
import { softwareDevices } from "../support/device.ts";
import { type DeviceMeter, deviceMeter } from "../support/device-meter.ts";
import { GPT2_124M, type Gpt2Shape, writeEmptyGpt2 } from "../support/empty-gpt2.ts";
import { fakeHub } from "../support/fake-hub.ts";
import { seededRandom, temporaryFolder } from "../support/safetensors.ts";

/** One is enough: nothing here depends on the driver. */
const device = softwareDevices.find(({ adapter }) => adapter !== undefined);
const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

const MIB = 2 ** 20;
const SEED = 20261129;

const surroundings = { log: silentLogger, env: { HF_HUB_OFFLINE: "1", HOME: folder.path } };

function configFor(modelId: string, memoryLimit: number, rest: Partial<NodeConfig> = {}): NodeConfig {
  return {
    modelId,
    shardStart: 0,
    host: "127.0.0.1",
    port: 0,
    allowedHosts: [],
    allowedOrigins: [],
    device: device!.adapter!,
    offline: true,
    memoryLimit,
    ...rest,
  };
}

/** Of the tiny model's width, for which drivers have compiled the kernels already: compiling takes longer than all else. */
function randomModel(random: () => number): Gpt2Shape {
  const from = (least: number, most: number) => least + Math.floor(random() * (most - least + 1));
  return { layers: from(1, 10), heads: 4, hidden: 96, vocab: 1024, positions: 8 * from(4, 32) };
}

/** Starts it, looks at what it took, asks it for as much as it says it can hold, and stops it. */
async function startAndServe(config: NodeConfig, { vocab, layers }: Gpt2Shape, meter: DeviceMeter): Promise<void> {
  meter.reset();
  const node = await startNode(config, surroundings);
  try {
    const info = (await (await fetch(new URL("info", node.url))).json()) as NodeInfo;
    expect(info.memory.allocated).toBeWithin(info.memory.planned * 0.98, info.memory.planned * 1.02 + 1);
    expect(info.memory.allocated).toBe(meter.liveBytes);
    const ids = Array.from({ length: info.max_context }, (_, position) => (position * 7) % vocab);
    const reply = await fetch(new URL("forward", node.url), {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Meshnet-Want": info.end === layers ? "token" : "hidden" },
      body: JSON.stringify({ input_ids: Array.from({ length: config.maxSessions! }, () => ids) }),
    });
    expect([reply.status, reply.ok || (await reply.text())]).toEqual([200, true]);
    await reply.arrayBuffer();
    expect(meter.peakBytes).toBeLessThanOrEqual(config.memoryLimit!);
  } finally {
    await node.stop();
  }
}

/** What the flags of a suggestion change, as the command line would. */
function withFlags(config: NodeConfig, flags: readonly string[]): NodeConfig {
  const given = Object.fromEntries(
    Array.from({ length: flags.length / 2 }, (_, i) => [flags[2 * i], flags[2 * i + 1]]),
  );
  const number = (flag: string, otherwise: number | undefined) => (given[flag] ? Number(given[flag]) : otherwise);
  return {
    ...config,
    shardEnd: number("--shard-end", config.shardEnd),
    maxContext: number("--max-context", config.maxContext),
    maxSessions: number("--max-sessions", config.maxSessions),
    memoryLimit: given["--memory-limit"] ? byteSize("--memory-limit", given["--memory-limit"]) : config.memoryLimit,
    quantization: (given["--quantization"] as Quantization | undefined) ?? config.quantization,
  };
}

test.skipIf(!device).each([false, true])(
  "a model on the Hub that does not fit is refused before more than headers are fetched (whole files: %p)",
  async (wholeFiles) => {
    const directory = writeEmptyGpt2(join(folder.path, `hub-${wholeFiles}`), GPT2_124M);
    const files = {
      "config.json": readFileSync(join(directory, "config.json")),
      "model.safetensors": Bun.file(join(directory, "model.safetensors")),
    };
    using hub = fakeHub({ "org/model": { files } });
    const config = configFor("org/model", 256 * MIB, { offline: false, wholeFiles });
    const env = { HF_ENDPOINT: hub.url, HOME: join(folder.path, `home-${wholeFiles}`) };
    const [started] = await Promise.allSettled([startNode(config, { log: silentLogger, env })]);
    if (started.status === "fulfilled") throw new Error("it started");
    expect([started.reason.code, started.reason.message]).toEqual(["does_not_fit", expect.any(String)]);
    expect(hub.servedBytes(".safetensors")).toBeWithin(1, 200_000);
  },
  30_000,
);

describe.skipIf(!device)("with 20 random models and limits", () => {
  const random = seededRandom(SEED);
  const cases = Array.from({ length: 20 }, (_, index) => ({
    index,
    shape: randomModel(random),
    memoryLimit: Math.floor((13.5 + 7 * random()) * MIB),
    maxSessions: 1 + Math.floor(random() * 4),
    quantization: QUANTIZATIONS[Math.floor(random() * 3)]!,
  }));
  const outcomes = { started: 0, refused: 0, suggested: 0 };

  test.each(cases)(
    "a node takes no byte more than it may, and serves full-length requests or says what would fit ($index)",
    async ({ index, shape, memoryLimit, ...rest }) => {
      using meter = await deviceMeter();
      const directory = writeEmptyGpt2(join(folder.path, `${index}`), shape);
      const config = configFor(directory, memoryLimit, rest);
      const [started] = await Promise.allSettled([startAndServe(config, shape, meter)]);
      if (started.status === "fulfilled") return void outcomes.started++;

      expect(started.reason).toBeInstanceOf(UserError);
      const { code, details } = started.reason as UserError;
      expect([code, meter.peakBytes, meter.liveBytes]).toEqual(["does_not_fit", 0, 0]);
      expect(details["available"]).toBe(memoryLimit);
      expect(details["needed"] as number).toBeGreaterThan(memoryLimit);
      outcomes.refused++;
      const suggestions = details["suggestions"] as string[][];
      // The mildest one, and that with the least limit that is enough.
      for (const flags of new Set([suggestions[0], suggestions.at(-1)].filter((flags) => flags !== undefined))) {
        await startAndServe(withFlags(config, flags), shape, meter);
        outcomes.suggested++;
      }
    },
    60_000,
  );

  test("both happens, and most refusals know a way out", () => {
    console.log(outcomes);
    expect(outcomes.started).toBeGreaterThanOrEqual(5);
    expect(outcomes.refused).toBeGreaterThanOrEqual(5);
    expect(outcomes.suggested).toBeGreaterThanOrEqual(5);
  });
});
