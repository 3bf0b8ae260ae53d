import { afterEach, beforeEach, expect, test } from "bun:test";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { RangeStore } from "../../src/hub/range-store.ts";
import { type TemporaryFolder, temporaryFolder } from "../support/safetensors.ts";

const INDEX = join(import.meta.dir, "../../src/index.ts");
const [OLD, NEW] = ["a".repeat(64), "b".repeat(64)];
const DAY_MS = 86_400_000;

let folder: TemporaryFolder;
let store: RangeStore;
beforeEach(async () => {
  folder = temporaryFolder();
  store = new RangeStore(join(folder.path, ".cache/meshnet/ranges"));
  await write(OLD, "org/old", 40);
  await write(NEW, "org/new", 1);
});
afterEach(() => folder[Symbol.dispose]());

const ROW = /^1\.0 MiB of 1\.0 GiB {2}(in use {4}|\d{4}-\d\d-\d\d) {2}org\/(old|new) model\.safetensors$/;

async function write(hash: string, modelId: string, ageDays: number): Promise<void> {
  const size = 2 ** 30;
  const file = store.file(hash, size);
  await using writer = await file.openToWrite();
  await writer.write(new Uint8Array(2 ** 20).fill(1), 2 ** 20);
  await writer.complete({ begin: 2 ** 20, end: 2 ** 21 });
  const usedAt = new Date(Date.now() - ageDays * DAY_MS).toISOString();
  file.info = { size, modelId, file: "model.safetensors", commit: "c".repeat(40), usedAt };
}

async function cache(...words: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  const child = Bun.spawn([process.execPath, INDEX, "cache", ...words], {
    env: { HOME: folder.path, PATH: process.env.PATH },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  return { code: await child.exited, stdout, stderr };
}

test("meshnet cache list says what is there, how much of the disk it takes, and when it was used", async () => {
  using _ = store.file(NEW, 2 ** 30).use()!;
  const { code, stdout } = await cache("list");
  expect(code).toBe(0);
  expect(stdout.split("\n").slice(0, 3)).toEqual([
    "ON DISK             LAST USE    FILE",
    expect.stringMatching(ROW),
    expect.stringMatching(ROW),
  ]);
  expect(stdout).toMatch(/in use {6}org\/new/);
  expect(stdout).toMatch(/\n2\.0 MiB in 2 files\n$/);
});

test.each([
  [["prune"], "deleted 1.0 MiB in 1 file", [NEW]],
  [["prune", "--older-than", "50"], "deleted 0 B in 0 files", [OLD, NEW]],
  [["prune", "--older-than=0"], "deleted 2.0 MiB in 2 files", []],
  [["prune", "--all"], "deleted 2.0 MiB in 2 files", []],
])("meshnet cache %j says %p", async (words, says, left) => {
  expect(await cache(...words)).toEqual({ code: 0, stdout: `${says}\n`, stderr: "" });
  expect(
    store
      .list()
      .map(({ hash }) => hash)
      .toSorted(),
  ).toEqual(left);
});

test("meshnet cache prune leaves what a living process uses", async () => {
  const file = store.file(OLD, 2 ** 30);
  using _ = file.use()!;
  const { code, stdout } = await cache("prune", "--all");
  expect([code, stdout]).toEqual([0, "deleted 1.0 MiB in 1 file\nkept org/old model.safetensors: in use\n"]);
  expect(existsSync(file.path)).toBe(true);
});

test("an empty store is said to be so, and another word is refused", async () => {
  await cache("prune", "--all");
  expect((await cache("list")).stdout).toBe("nothing was fetched in parts\n");
  expect(await cache("clean")).toMatchObject({ code: 2, stderr: expect.stringContaining("list or prune") });
  expect((await cache("list", "--cache-dir", join(folder.path, "x"))).stdout).toBe("nothing was fetched in parts\n");
});
