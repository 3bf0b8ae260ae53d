import { afterAll, beforeEach, afterEach, describe, expect, test } from "bun:test";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { silentLogger } from "../../src/base/log.ts";
import { resolveModel } from "../../src/hub/snapshot.ts";
import { type FakeHub, fakeHub } from "../support/fake-hub.ts";
import { seededRandom, temporaryFolder } from "../support/safetensors.ts";

const random = seededRandom(5);
const WEIGHTS = Uint8Array.from({ length: 2_500_000 }, () => random() * 256);
const ALL = [{ name: "model.safetensors", ranges: [{ begin: 0, end: WEIGHTS.length }] }];

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** A disk of 4 MiB, which only root may make. */
const disk = join(folder.path, "disk");
mkdirSync(disk);
const mount = () => Bun.spawnSync(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]).success;
const unmount = () => Bun.spawnSync(["umount", disk]).success;
const isRoot = process.platform === "linux" && Bun.which("mount") !== null && mount() && unmount();

describe.skipIf(!isRoot)(`a small disk${isRoot ? "" : " (needs root, to mount one)"}`, () => {
  let hub: FakeHub;
  beforeEach(() => {
    mount();
    hub = fakeHub({ "org/model": { files: { "model.safetensors": WEIGHTS } } });
  });
  afterEach(() => {
    hub[Symbol.dispose]();
    unmount();
  });

  const start = async () => {
    const env = { HOME: disk, HF_ENDPOINT: hub.url };
    const transfer = { rangeBytes: 200_000 };
    const snapshot = await resolveModel({ modelId: "org/model", env, log: silentLogger, retryPauseMs: 1, transfer });
    using _ = snapshot;
    await snapshot.ensure(ALL);
    return readFileSync(snapshot.pathOf("model.safetensors"));
  };
  const filler = join(disk, "filler");
  const failure = () =>
    start().then(
      () => undefined,
      (error) => error,
    );

  test("that has too little room is told before anything is fetched, with both numbers", async () => {
    writeFileSync(filler, new Uint8Array(3 * 2 ** 20));
    const error = await failure();
    expect(error).toMatchObject({
      code: "download",
      message: expect.stringMatching(
        /^fetching 2\.4 MiB of org\/model needs 2\.4 MiB more, and the disk of .* has (1\.0 MiB|\d+\.\d KiB) free$/,
      ),
      hint: expect.stringContaining("--cache-dir"),
    });
    expect(hub.served).toEqual([]);
  });

  test("that becomes full meanwhile ends the download, which goes on from there once there is room", async () => {
    hub.behaviour = { bytesPerSecond: 500_000 };
    const failing = failure();
    while (hub.servedBytes() < 500_000) await Bun.sleep(10);
    fill();
    const error = await failing;
    expect([error?.code, error?.message]).toEqual([
      "download",
      "the disk is full: what is fetched of org/model cannot be written any further",
    ]);
    rmSync(filler);
    hub.behaviour = {};
    const before = hub.servedBytes();
    expect(Bun.hash(await start())).toBe(Bun.hash(WEIGHTS));
    expect(hub.servedBytes() - before).toBeLessThan(WEIGHTS.length - 200_000);
    expect(readdirSync(join(disk, ".cache/meshnet/ranges"))).toHaveLength(1);
  });

  /** To the last byte. */
  function fill(): void {
    try {
      for (;;) writeFileSync(filler, new Uint8Array(4096), { flag: "a" });
    } catch {
      // it is full
    }
  }
});

test("a cache that cannot be written is told with a way out", async () => {
  using hub = fakeHub({ "org/model": { files: { "model.safetensors": WEIGHTS } } });
  writeFileSync(join(folder.path, "file"), "");
  const env = { HOME: folder.path, XDG_CACHE_HOME: join(folder.path, "file"), HF_ENDPOINT: hub.url };
  const snapshot = await resolveModel({ modelId: "org/model", env, log: silentLogger });
  const error = await snapshot.ensure(ALL).catch((error) => error);
  expect(error).toMatchObject({
    code: "download",
    message: expect.stringContaining("what is fetched of org/model cannot be written into the cache"),
    hint: expect.stringContaining("--cache-dir"),
  });
});
