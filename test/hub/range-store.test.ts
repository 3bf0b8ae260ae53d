import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { appendFileSync, existsSync, readdirSync, readFileSync, rmSync, statSync, truncateSync } from "node:fs";
import { join } from "node:path";
import { tryLock } from "../../src/hub/lock.ts";
import { RangeStore, type StoredFile } from "../../src/hub/range-store.ts";
import { type TemporaryFolder, temporaryFolder } from "../support/safetensors.ts";

const HASH = "a".repeat(64);
const SIZE = 2 ** 30;
const MODEL = { modelId: "org/model", file: "model.safetensors", commit: "c".repeat(40) };

let folder: TemporaryFolder;
let store: RangeStore;
let file: StoredFile;

beforeEach(() => {
  folder = temporaryFolder();
  store = new RangeStore(folder.path);
  file = store.file(HASH, SIZE);
});
afterEach(() => folder[Symbol.dispose]());

const path = (name: string) => join(folder.path, HASH, name);
const all = { begin: 0, end: SIZE };

async function write(begin: number, text: string): Promise<void> {
  await using writer = await file.openToWrite();
  await writer.write(Buffer.from(text), begin);
  await writer.complete({ begin, end: begin + text.length });
}

test("bytes lie at their own places in a file of full size that takes only their room", async () => {
  await write(SIZE - 5, "later");
  await write(100, "first");
  const { size, blocks } = statSync(file.path);
  expect(size).toBe(SIZE);
  expect(blocks * 512).toBeLessThan(64 * 1024);
  expect(
    file.missing([
      { begin: 100, end: 105 },
      { begin: SIZE - 5, end: SIZE },
    ]),
  ).toEqual([]);
  expect(file.missing([all])).toEqual([
    { begin: 0, end: 100 },
    { begin: 105, end: SIZE - 5 },
  ]);
});

test("what was written but not said to be complete is missing", async () => {
  {
    await using writer = await file.openToWrite();
    await writer.write(Buffer.from("half"), 0);
  }
  expect(file.missing([{ begin: 0, end: 4 }])).toEqual([{ begin: 0, end: 4 }]);
});

test.each([
  ["a line that was cut short", "20 3"],
  ["a line that was cut short after its first number", "20 "],
  ["noise", "\0\0\0\0 x\n"],
  ["a range beyond the file", `5 ${SIZE + 1}\n`],
  ["a range that runs backwards", "9 5\n"],
])("%s in the journal counts for nothing, and harms no line after it", async (_, garbage) => {
  await write(0, "ab");
  appendFileSync(path("journal"), garbage);
  expect(file.missing([{ begin: 0, end: 30 }])).toEqual([{ begin: 2, end: 30 }]);
  await write(10, "cd");
  expect(file.missing([{ begin: 0, end: 30 }])).toEqual([
    { begin: 2, end: 10 },
    { begin: 12, end: 30 },
  ]);
});

test("the journal is made short when it is opened", async () => {
  for (const begin of [0, 2, 4, 6]) await write(begin, "ab");
  await write(100, "x");
  expect(readFileSync(path("journal"), "utf8")).toBe("0 8\n100 101\n");
});

test.each([
  ["is gone", () => rmSync(file.path)],
  ["has another size", () => truncateSync(file.path, 5)],
])("a journal whose data %s is not believed, then and later", async (_, harm) => {
  await write(0, "ab");
  harm();
  expect(file.missing([{ begin: 0, end: 2 }])).toEqual([{ begin: 0, end: 2 }]);
  await write(10, "cd");
  expect(file.missing([{ begin: 0, end: 2 }])).toEqual([{ begin: 0, end: 2 }]);
});

describe("deleting", () => {
  test("removes a file that nobody uses", async () => {
    await write(0, "ab");
    file.info = { ...MODEL, size: SIZE, usedAt: "2026-01-01T00:00:00.000Z" };
    expect(store.list()).toMatchObject([{ ...MODEL, hash: HASH, isInUse: false }]);
    expect(store.list()[0]!.diskBytes).toBeWithin(1, 64 * 1024);
    expect(store.remove(HASH)).toBe(true);
    expect(readdirSync(folder.path)).toEqual([]);
    expect(store.list()).toEqual([]);
  });

  test("leaves a file that is used alone, by however many", async () => {
    await write(0, "ab");
    file.info = { ...MODEL, size: SIZE, usedAt: "2026-01-01T00:00:00.000Z" };
    const [one, other] = [file.use()!, file.use()!];
    expect(store.list()[0]!.isInUse).toBe(true);
    expect(store.remove(HASH)).toBe(false);
    one[Symbol.dispose]();
    expect(store.remove(HASH)).toBe(false);
    expect(file.missing([{ begin: 0, end: 2 }])).toEqual([]);
    other[Symbol.dispose]();
    expect(store.remove(HASH)).toBe(true);
  });
});

describe("a lock", () => {
  test("is waited for, and who has it is told", async () => {
    const held = await file.lockDownload(() => {});
    const waited: (number | undefined)[] = [];
    const next = file.lockDownload((pid) => waited.push(pid));
    await Bun.sleep(80);
    expect(waited).toEqual([process.pid]);
    held[Symbol.dispose]();
    (await next)[Symbol.dispose]();
  });

  test("of a process that was killed is free", async () => {
    const script = `import { tryLock } from ${JSON.stringify(join(import.meta.dir, "../../src/hub/lock.ts"))};
      tryLock(${JSON.stringify(path("x.lock"))}, "exclusive"); console.log("held"); await Bun.sleep(60_000);`;
    const child = Bun.spawn([process.execPath, "-e", script], { stdout: "pipe" });
    await child.stdout.getReader().read();
    expect(tryLock(path("x.lock"), "exclusive")).toBeUndefined();
    expect(readFileSync(path("x.lock"), "utf8")).toBe(`${child.pid}\n`);
    child.kill("SIGKILL");
    await child.exited;
    using held = tryLock(path("x.lock"), "exclusive");
    expect(held).toBeDefined();
  });

  test("on a disk that cannot be written is none, and no failure", () => {
    rmSync(join(folder.path, HASH), { recursive: true, force: true });
    expect(existsSync("/proc/version")).toBe(process.platform === "linux");
    using held = tryLock("/proc/version/x.lock", "shared");
    expect(held).toBeDefined();
  });
});
