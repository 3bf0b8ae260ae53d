import { describe, expect, test } from "bun:test";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { INDEX_FILE, neededFiles, openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { safetensorsFile, temporaryFolder } from "../support/safetensors.ts";

const tensor = (value: number) => ({ dtype: "U8", shape: [1], data: Uint8Array.of(value) });
const FIRST = "model-00001-of-00002.safetensors";
const SECOND = "model-00002-of-00002.safetensors";

test("a checkpoint of one file gives its tensors", () => {
  using folder = temporaryFolder();
  writeFileSync(join(folder.path, "model.safetensors"), safetensorsFile({ a: tensor(1), b: tensor(2) }));
  const { files, tensors } = openCheckpoint(folder.path);
  expect(files.map(({ name }) => name)).toEqual(["model.safetensors"]);
  expect([...tensors.keys()]).toEqual(["a", "b"]);
  expect(tensors.get("a")?.file).toBe(files[0]!);
});

test("a sharded checkpoint gives the tensors of all its shards", () => {
  using folder = sharded({ a: FIRST, b: SECOND });
  const { files, tensors } = openCheckpoint(folder.path);
  expect(files.map(({ name }) => name)).toEqual([FIRST, SECOND]);
  expect(tensors.get("b")?.file.path).toBe(join(folder.path, SECOND));
});

test("a shard without a needed tensor need not be there", () => {
  using folder = sharded({ a: FIRST, b: SECOND });
  rmSync(join(folder.path, FIRST));
  const needs = (name: string) => name === "b";
  expect(neededFiles(folder.path, { needs })).toEqual([SECOND]);
  expect([...openCheckpoint(folder.path, { needs }).tensors.keys()]).toEqual(["b"]);
});

test("only tensors that are needed are kept, also of a file that has others", () => {
  using folder = sharded({ a: FIRST, b: FIRST, c: SECOND });
  const needs = (name: string) => name !== "b";
  const { files, tensors } = openCheckpoint(folder.path, { needs });
  expect([...tensors.keys()]).toEqual(["a", "c"]);
  expect(files.map(({ name }) => name)).toEqual([FIRST, SECOND]);
});

test("the one file wins over an index beside it", () => {
  using folder = sharded({ a: FIRST, b: SECOND });
  writeFileSync(join(folder.path, "model.safetensors"), safetensorsFile({ whole: tensor(1) }));
  expect([...openCheckpoint(folder.path).tensors.keys()]).toEqual(["whole"]);
});

test("without an index the one file is what is needed", () => {
  using folder = temporaryFolder();
  expect(neededFiles(folder.path)).toEqual(["model.safetensors"]);
});

describe("a checkpoint that does not fit together is refused", () => {
  test("a missing shard is named", () => {
    using folder = sharded({ a: FIRST, b: SECOND });
    rmSync(join(folder.path, SECOND));
    expect(() => openCheckpoint(folder.path)).toThrow(`${SECOND}, named by ${INDEX_FILE}, is missing`);
  });

  test("a tensor the index promises is not in its shard", () => {
    using folder = sharded({ a: FIRST, b: SECOND, c: FIRST }, { [FIRST]: ["a"], [SECOND]: ["b"] });
    expect(() => openCheckpoint(folder.path)).toThrow(`puts tensor "c" into ${FIRST}, which does not have it`);
  });

  test("a tensor is in two shards", () => {
    using folder = sharded({ a: FIRST, b: SECOND }, { [FIRST]: ["a"], [SECOND]: ["a", "b"] });
    expect(() => openCheckpoint(folder.path)).toThrow(`does not put tensor "a" into ${SECOND}, which has it`);
  });

  test("its index is a directory", () => {
    using folder = temporaryFolder();
    mkdirSync(join(folder.path, INDEX_FILE));
    expect(() => openCheckpoint(folder.path)).toThrow(`${INDEX_FILE} cannot be read`);
  });

  test("its index is not UTF-8", () => {
    using folder = temporaryFolder();
    writeFileSync(join(folder.path, INDEX_FILE), Uint8Array.of(0x7b, 0x22, 0xff, 0x22, 0x7d));
    expect(() => openCheckpoint(folder.path)).toThrow(`${INDEX_FILE} is not valid UTF-8`);
  });

  test("its index puts a tensor into the wrong shard", () => {
    using folder = sharded({ a: SECOND, b: SECOND }, { [SECOND]: ["b"], [FIRST]: ["a"] });
    expect(() => openCheckpoint(folder.path)).toThrow(`puts tensor "a" into ${SECOND}, which does not have it`);
  });

  test("a part of a shard's path is a file", () => {
    using folder = sharded({ a: "folder/x.safetensors" }, {});
    writeFileSync(join(folder.path, "folder"), "");
    expect(() => openCheckpoint(folder.path)).toThrow(`folder/x.safetensors, named by ${INDEX_FILE}, is missing`);
  });

  test("there are no weights", () => {
    using folder = temporaryFolder();
    expect(() => openCheckpoint(folder.path)).toThrow("has neither model.safetensors nor");
  });

  test("the weights are a directory", () => {
    using folder = sharded({ a: FIRST, b: SECOND });
    rmSync(join(folder.path, FIRST));
    mkdirSync(join(folder.path, FIRST));
    expect(() => openCheckpoint(folder.path)).toThrow(`${FIRST} is not a file`);
  });

  test.each([
    ["{", "is not valid JSON"],
    ["[]", "must have one weight_map that is an object, and has []"],
    ["{}", "must have one weight_map that is an object, and has none"],
    ['{"weight_map":{},"weight_map":{}}', "must have one weight_map that is an object, and has two"],
    ['{"weight_map":[]}', "must have one weight_map that is an object, and has []"],
    ['{"weight_map":{}} {}', "something follows the JSON value"],
    ['{"weight_map":{"a":1}}', 'gives 1 as the file of "a"'],
    [`{"weight_map":{"a":"${FIRST}","a":"${SECOND}"}}`, 'has "a" twice'],
  ])("its index is %s", (index, problem) => {
    using folder = temporaryFolder();
    writeFileSync(join(folder.path, INDEX_FILE), index);
    expect(() => openCheckpoint(folder.path)).toThrow(problem);
  });

  test.each([
    ["", "an empty name"],
    ["/etc/passwd", "an absolute path"],
    ["../model.safetensors", "a path segment"],
    ["a/./b", "a path segment"],
    ["a//b", "a path segment"],
    ["%2e%2e/model.safetensors", "a path segment"],
    ["%252e%252e%252fmodel.safetensors", "a path segment"], // decoded more than once on its way
    ["a\\b", "a backslash"],
    ["a\0b", "a control character"],
    ["a%00b", "a control character"],
    ["c:model.safetensors", "a colon"],
    ["https://x/y", "a colon"],
    ["100%", "a broken percent escape"],
  ])("its index names the shard %p", (shard, reason) => {
    using folder = temporaryFolder();
    writeFileSync(join(folder.path, INDEX_FILE), JSON.stringify({ weight_map: { a: shard } }));
    expect(() => neededFiles(folder.path)).toThrow(reason);
  });
});

/** A directory with an index and the shards it names; `inFiles` where the shards hold something else than it says. */
function sharded(weightMap: Record<string, string>, inFiles = byFile(weightMap)) {
  const folder = temporaryFolder();
  writeFileSync(
    join(folder.path, INDEX_FILE),
    JSON.stringify({ metadata: { total_size: 1.5 }, weight_map: weightMap }),
  );
  for (const [file, names] of Object.entries(inFiles)) {
    const tensors = Object.fromEntries(names.map((name) => [name, tensor(0)]));
    writeFileSync(join(folder.path, file), safetensorsFile(tensors));
  }
  return folder;
}

function byFile(weightMap: Record<string, string>): Record<string, string[]> {
  const names = Object.keys(weightMap);
  return Object.fromEntries(
    Object.values(weightMap).map((file) => [file, names.filter((name) => weightMap[name] === file)]),
  );
}
