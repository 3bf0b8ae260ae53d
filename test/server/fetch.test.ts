import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { closeSync, openSync, readFileSync, readSync } from "node:fs";
import { join } from "node:path";
import { silentLogger } from "../../src/base/log.ts";
import { type ByteRange, byteCount, joined, without } from "../../src/hub/ranges.ts";
import { readHeader } from "../../src/safetensors/header.ts";
import { startNode } from "../../src/server/node.ts";
import { type NodeConfig, planNode } from "../../src/server/plan-node.ts";
import { writeCheckpoint } from "../fixtures/gpt2-124m.ts";
import { type FakeHub, fakeHub } from "../support/fake-hub.ts";
import { TINY, variant } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());
const files = (directory: string, ...names: string[]) =>
  Object.fromEntries(names.map((name) => [name, new Uint8Array(readFileSync(join(directory, name)))]));

const HEADER_BYTES = 100_000; // what is asked for at first
const config = (more: Partial<NodeConfig>): NodeConfig => ({
  modelId: "org/model",
  shardStart: 0,
  host: "127.0.0.1",
  port: 0,
  allowedHosts: [],
  allowedOrigins: [],
  quantization: "bfloat16",
  device: "cpu",
  offline: false,
  ...more,
});
const surroundings = (hub: FakeHub, home: string) => ({
  log: silentLogger,
  env: { HOME: join(folder.path, home), HF_ENDPOINT: hub.url },
});

describe("GPT-2 with 124 million parameters", () => {
  const PER_LAYER = 4 * (768 * 4 + 768 * 2304 + 2304 + 768 * 768 + 768 + 768 * 3072 + 3072 + 3072 * 768 + 768);
  const WTE = 4 * 50257 * 768;
  const WPE = 4 * 1024 * 768;
  const FINAL_NORM = 4 * 768 * 2;

  let hub: FakeHub;
  let size: number;
  beforeAll(async () => {
    const directory = join(folder.path, "gpt2");
    await writeCheckpoint(directory, 12, 768);
    const weights = Bun.file(join(directory, "model.safetensors"));
    hub = fakeHub({ "org/model": { files: { ...files(directory, "config.json"), "model.safetensors": weights } } });
    ({ size } = weights);
  }, 60_000);
  afterAll(() => hub[Symbol.dispose]());

  test.each([
    ["layers 4 to 8", 4, 8, 4 * PER_LAYER, 113],
    ["a head of layers 0 to 6", 0, 6, WTE + WPE + 6 * PER_LAYER, 328],
    ["a tail of layers 6 to 12, whose head is tied to the embedding", 6, 12, 6 * PER_LAYER + FINAL_NORM + WTE, 325],
    ["the whole", 0, 12, WTE + WPE + 12 * PER_LAYER + FINAL_NORM, 498],
  ])("as %s needs no byte more than its tensors", async (_, shardStart, shardEnd, bytes, megabytes) => {
    const { fetch, snapshot } = await planNode(
      config({ shardStart, shardEnd }),
      surroundings(hub, `plan-${shardStart}`),
    );
    using _snapshot = snapshot;
    expect(fetch).toMatchObject({ fetchBytes: bytes, hereBytes: 0, checkpointBytes: size });
    expect(Math.round(bytes / 1e6)).toBe(megabytes);
    expect(Math.round(size / 1e6)).toBe(548);
  });

  test("is planned with its header alone", () => {
    for (const { end } of hub.served.filter(({ file }) => file.endsWith(".safetensors")))
      expect(end).toBe(HEADER_BYTES);
  });

  test.skipIf(!process.env.LONG_TESTS)(
    `fetches 113 MB for layers 4 to 8, and nothing twice${process.env.LONG_TESTS ? "" : " (only in the long tests)"}`,
    async () => {
      const before = hub.servedBytes(".safetensors");
      const plan = await planNode(config({ shardStart: 4, shardEnd: 8 }), surroundings(hub, "long"));
      using snapshot = plan.snapshot;
      const began = performance.now();
      await snapshot.ensure(plan.fetch.parts);
      const seconds = (performance.now() - began) / 1000;
      console.log(`${plan.fetch.fetchBytes} bytes in ${seconds.toFixed(1)} s`);
      expect(hub.servedBytes(".safetensors") - before).toBe(4 * PER_LAYER + HEADER_BYTES);
      expectSame(
        snapshot.pathOf("model.safetensors"),
        join(folder.path, "gpt2/model.safetensors"),
        plan.fetch.parts[0]!.ranges,
      );
    },
    120_000,
  );
});

describe("a node of layers 1 to 3 of a model on the Hub", () => {
  const path = join(TINY, "model.safetensors");
  const layers = config({ shardStart: 1, shardEnd: 3 });
  /** The tiny model's masks are smaller than the gaps that are fetched along else. */
  const transfer = { gapBytes: 4096 };
  let hub: FakeHub;
  beforeAll(() => {
    hub = fakeHub({
      "org/model": { files: files(TINY, "config.json", "generation_config.json", "model.safetensors") },
    });
  });
  afterAll(() => hub[Symbol.dispose]());

  test("fetches the bytes of its layers, skips the masks among them, loads and serves", async () => {
    const node = await startNode(layers, { ...surroundings(hub, "node"), transfer });
    const health = await fetch(new URL("health/live", node.url));
    await node.stop();
    expect(health.status).toBe(200);

    const tensors = [...readHeader(path).values()];
    const wanted = tensors.filter(({ name }) => /\bh\.[12]\./.test(name) && !/\.attn\.(masked_)?bias$/.test(name));
    const header = { begin: 0, end: HEADER_BYTES };
    const least = byteCount(joined([...wanted, header]));
    const served = joined(hub.served.filter(({ file }) => file === "model.safetensors"));
    expect(without(joined(wanted), served)).toEqual([]);
    expect(hub.servedBytes(".safetensors")).toBeWithin(least, least + 4096 * wanted.length);
    const masks = tensors.filter(({ name }) => name.endsWith(".attn.bias"));
    expect(masks).toHaveLength(4);
    for (const mask of masks) {
      expect(without([mask], joined([header])).map(({ begin, end }) => without(served, [{ begin, end }]))).toEqual(
        without([mask], joined([header])).map(() => served), // none of it was served
      );
    }
  }, 60_000);

  test("starts a second time without the network", async () => {
    hub.requests.length = 0;
    const { fetch, load, snapshot } = await planNode({ ...layers, offline: true }, surroundings(hub, "node"));
    using _ = snapshot;
    expect(fetch).toMatchObject({ fetchBytes: 0, hereBytes: load.readBytes });
    await snapshot.ensure(fetch.parts);
    expectSame(snapshot.pathOf("model.safetensors"), path, fetch.parts[0]!.ranges);
    expect(hub.requests).toEqual([]);
  });

  test("fetches whole files where that is wanted, and reads those", async () => {
    const { fetch, load, snapshot } = await planNode({ ...layers, wholeFiles: true }, surroundings(hub, "whole"));
    using _ = snapshot;
    expect(fetch.fetchBytes).toBe(0);
    expect(load.weights[0]!.source.file.path).toBe(join(snapshot.directory, "model.safetensors"));
    expect(Bun.hash(readFileSync(load.weights[0]!.source.file.path))).toBe(Bun.hash(readFileSync(path)));
  });
});

describe("a model in shards", () => {
  const directory = variant("sharded");
  const shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
  let hub: FakeHub;
  beforeAll(() => {
    hub = fakeHub({
      "org/model": { files: files(directory, "config.json", "model.safetensors.index.json", ...shards) },
    });
  });
  afterAll(() => hub[Symbol.dispose]());

  test("gives up only the shards and the bytes that the layers need", async () => {
    const plan = await planNode(config({ shardStart: 1, shardEnd: 2 }), surroundings(hub, "sharded"));
    using snapshot = plan.snapshot;
    await snapshot.ensure(plan.fetch.parts);
    const total = shards.reduce((bytes, name) => bytes + Bun.file(join(directory, name)).size, 0);
    expect(plan.fetch.checkpointBytes).toBe(total);
    const needed = new Set(plan.load.weights.map(({ source }) => source.file.name));
    expect(new Set(hub.served.map(({ file }) => file).filter((file) => file.endsWith(".safetensors")))).toEqual(needed);
    for (const { name, ranges } of plan.fetch.parts) expectSame(snapshot.pathOf(name), join(directory, name), ranges);
  });
});

test("a header that is longer than what is asked for at first is fetched to its end, and once", async () => {
  const tensors = await Bun.file(join(TINY, "model.safetensors")).bytes();
  const length = Number(new DataView(tensors.buffer).getBigUint64(0, true));
  const header = new TextDecoder().decode(tensors.subarray(8, 8 + length)).trimEnd();
  const padding = 250_000;
  const long = Buffer.concat([
    new Uint8Array(8),
    Buffer.from(header.padEnd(length + padding)),
    tensors.subarray(8 + length),
  ]);
  new DataView(long.buffer, long.byteOffset).setBigUint64(0, BigInt(length + padding), true);
  using hub = fakeHub({
    "org/model": { files: { ...files(TINY, "config.json"), "model.safetensors": new Uint8Array(long) } },
  });
  const { snapshot } = await planNode(config({ shardStart: 1, shardEnd: 2 }), surroundings(hub, "header"));
  snapshot[Symbol.dispose]();
  const served = hub.served.filter(({ file }) => file === "model.safetensors");
  expect(served.map(({ begin, end }) => [begin, end])).toEqual([
    [0, HEADER_BYTES],
    [HEADER_BYTES, 8 + length + padding],
  ]);
});

function expectSame(path: string, original: string, ranges: readonly ByteRange[]): void {
  expect(ranges.length).toBeGreaterThan(0);
  for (const { begin, end } of ranges) {
    expect(Bun.hash(readAt(path, begin, end))).toBe(Bun.hash(readAt(original, begin, end)));
  }
}

function readAt(path: string, begin: number, end: number): Uint8Array {
  const file = openSync(path, "r");
  const bytes = new Uint8Array(end - begin);
  expect(readSync(file, bytes, 0, bytes.length, begin)).toBe(bytes.length);
  closeSync(file);
  return bytes;
}
