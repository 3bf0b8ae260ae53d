import { describe, expect, test } from "bun:test";
import { mkdirSync, readFileSync, utimesSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { silentLogger } from "../../src/base/log.ts";
import { modelDigest } from "../../src/hub/digest.ts";
import { resolveModel } from "../../src/hub/snapshot.ts";
import { fakeHub } from "../support/fake-hub.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const CONFIG = '{"model_type":"gpt2"}';
const FIRST = "model-00001-of-00002.safetensors";
const SECOND = "model-00002-of-00002.safetensors";
const SINGLE = { "config.json": CONFIG, "model.safetensors": "weights", "README.md": "x", "other.safetensors": "y" };
const SHARDED = {
  "config.json": CONFIG,
  "model.safetensors.index.json": JSON.stringify({ weight_map: { a: FIRST, b: SECOND, c: FIRST } }),
  [FIRST]: "first",
  [SECOND]: "second",
};

describe.each([
  ["of one file", SINGLE],
  ["in shards", SHARDED],
])("a model %s", (_, files: Record<string, string>) => {
  test("has the same digest on the Hub, where no weights are fetched, and as a copy in a directory", async () => {
    using folder = temporaryFolder();
    using hub = fakeHub({ "org/model": { files } });
    const env = { HOME: folder.path, HF_ENDPOINT: hub.url };
    const remote = await resolveModel({ modelId: "org/model", env, log: silentLogger });
    const digest = await modelDigest(remote, env);
    expect(digest).toMatch(/^[0-9a-f]{64}$/);
    expect(hub.requests.filter((request) => request.endsWith(".safetensors"))).toEqual([]);
    expect(await localDigest(files)).toBe(digest);
  });

  test("has another digest with any other weight or config", async () => {
    const digest = await localDigest(files);
    for (const name of Object.keys(files).filter((file) => /^(model.*safetensors|config\.json)$/.test(file))) {
      expect(await localDigest({ ...files, [name]: `${files[name]} ` })).not.toBe(digest);
    }
  });

  test("does not count files that are no part of it", async () => {
    expect(await localDigest({ ...files, "NOTES.txt": "x", "adapter.safetensors": "y" })).toBe(
      await localDigest(files),
    );
  });
});

test("weights that git holds itself, of which the Hub lists no sha256, are fetched and counted", async () => {
  using folder = temporaryFolder();
  using hub = fakeHub({ "org/model": { files: SINGLE, large: [] } });
  const env = { HOME: folder.path, HF_ENDPOINT: hub.url };
  const remote = await resolveModel({ modelId: "org/model", env, log: silentLogger });
  expect(await modelDigest(remote, env)).toBe(await localDigest(SINGLE));
});

test("the hash of a local file is remembered until the file changes, even where its size and time are made to stay", async () => {
  using folder = temporaryFolder();
  const directory = write(join(folder.path, "model"), SINGLE);
  const path = join(directory, "model.safetensors");
  const env = { HOME: folder.path };
  const digest = async () => await modelDigest(await resolveModel({ modelId: directory, env, log: silentLogger }), env);
  utimesSync(path, 1000, 1000);
  const first = await digest();
  expect(await digest()).toBe(first);

  const memory = join(folder.path, ".cache/meshnet/sha256.json");
  const remembered = JSON.parse(readFileSync(memory, "utf8"));
  expect(Object.keys(remembered)).toEqual([path]);
  writeFileSync(memory, JSON.stringify({ [path]: { ...remembered[path], sha256: "0".repeat(64) } }));
  expect(await digest()).not.toBe(first); // what is remembered is what counts
  writeFileSync(memory, JSON.stringify(remembered));

  await Bun.sleep(20); // the clock of a file system may tick slowly
  writeFileSync(path, "WEIGHTS");
  utimesSync(path, 1000, 1000);
  expect(await digest()).not.toBe(first);
});

test("a cache that is damaged or cannot be written costs only time", async () => {
  using folder = temporaryFolder();
  mkdirSync(join(folder.path, ".cache/meshnet"), { recursive: true });
  writeFileSync(join(folder.path, ".cache/meshnet/sha256.json"), "{");
  const directory = write(join(folder.path, "model"), SINGLE);
  const snapshot = await resolveModel({ modelId: directory, env: {}, log: silentLogger });
  const digest = await modelDigest(snapshot, { HOME: folder.path });
  writeFileSync(join(folder.path, "file"), "");
  expect(await modelDigest(snapshot, { HOME: join(folder.path, "file") })).toBe(digest);
});

describe("a model whose digest cannot be told is refused", () => {
  test.each([
    ["has neither model.safetensors nor", { "config.json": CONFIG }],
    ["has no config.json", { "model.safetensors": "x" }],
    [
      `has no ${SECOND}`,
      { "config.json": CONFIG, "model.safetensors.index.json": SHARDED["model.safetensors.index.json"], [FIRST]: "x" },
    ],
    ["has no weight_map", { "config.json": CONFIG, "model.safetensors.index.json": "{" }],
  ])("%s", async (problem, files) => {
    await expect(localDigest(files)).rejects.toMatchObject({
      code: "bad_model",
      message: expect.stringContaining(problem),
    });
  });
});

async function localDigest(files: Record<string, string>): Promise<string> {
  using folder = temporaryFolder();
  const directory = write(join(folder.path, "copy"), files);
  const env = { HOME: folder.path };
  return await modelDigest(await resolveModel({ modelId: directory, env, log: silentLogger }), env);
}

function write(directory: string, files: Record<string, string>): string {
  mkdirSync(directory);
  for (const [name, text] of Object.entries(files)) writeFileSync(join(directory, name), text);
  return directory;
}
