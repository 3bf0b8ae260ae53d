import { expect, test } from "bun:test";
import {
  chmodSync,
  closeSync,
  ftruncateSync,
  openSync,
  readdirSync,
  readlinkSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import type { CheckpointFile } from "../../src/safetensors/checkpoint.ts";
import { RangeReader } from "../../src/safetensors/range-reader.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const content = Uint8Array.from({ length: 200_000 }, (_, i) => (i * 7) % 251);

test.each([
  [0, 200_000],
  [1, 10], // unaligned to everything
  [65_535, 2],
  [199_999, 1],
  [200_000, 0],
  [5, 0], // an empty tensor
])("the range from %d on of %d bytes is the file's", (offset, length) => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  expect(read(reader, write(folder.path), offset, length)).toEqual(content.subarray(offset, offset + length));
});

test("a file that may only be read is read", () => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const file = write(folder.path);
  chmodSync(file.path, 0o400);
  expect(read(reader, file, 10, 5)).toEqual(content.subarray(10, 15));
});

test("a range beyond 4 GiB of a large file is read", () => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const path = join(folder.path, "model.safetensors");
  const descriptor = openSync(path, "w");
  ftruncateSync(descriptor, 5 * 2 ** 30);
  writeSync(descriptor, Uint8Array.of(1, 2, 3), 0, 3, 2 ** 32 + 12_345);
  closeSync(descriptor);
  expect([...read(reader, fileAt(path), 2 ** 32 + 12_344, 5)]).toEqual([0, 1, 2, 3, 0]);
});

test("as many shards as one likes are read through one open file, and none is left open", () => {
  using folder = temporaryFolder();
  const files = Array.from({ length: 20 }, (_, shard) => write(folder.path, `${shard}.safetensors`));
  const open = () => openPaths().filter((path) => path.startsWith(folder.path)).length;
  {
    using reader = new RangeReader();
    for (const file of [...files, ...files]) {
      expect(read(reader, file, 3, 2)).toEqual(content.subarray(3, 5));
      expect(open()).toBeLessThanOrEqual(1);
    }
  }
  expect(open()).toBe(0);
});

test("a file that is cut short while it is open is refused with its name, the place and both sizes", () => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const file = write(folder.path);
  read(reader, file, 0, 10);
  truncateSync(file.path, 95);
  expect(refusal(() => read(reader, file, 90, 20)).message).toBe(
    "model.safetensors: bytes 90-110 are wanted of the file that had 200000 bytes when its header was read, and now it has 95",
  );
  expect(read(reader, file, 90, 5)).toEqual(content.subarray(90, 95));
});

test.each([
  ["shorter", 100],
  ["longer", 200_001],
])("a file that has become %s since its header was read is refused before a byte of it is used", (_, size) => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const file = write(folder.path);
  truncateSync(file.path, size);
  expect(refusal(() => read(reader, file, 0, 10)).message).toEndWith(
    `had 200000 bytes when its header was read, and now it has ${size}`,
  );
});

test("a file that has vanished since its header was read is refused by name", () => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const file = write(folder.path);
  rmSync(file.path);
  expect(refusal(() => read(reader, file, 7, 10)).message).toMatch(
    /^model.safetensors: bytes 7-17 are wanted of the file that had 200000 bytes .* cannot be opened any more \(ENOENT/,
  );
});

test("a file that vanishes while it is read is read to its end", () => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const file = write(folder.path);
  read(reader, file, 0, 10);
  rmSync(file.path);
  expect(read(reader, file, 100, 10)).toEqual(content.subarray(100, 110));
});

test("what the system cannot read is refused with its reason", () => {
  using folder = temporaryFolder();
  using reader = new RangeReader();
  const directory = fileAt(folder.path);
  expect(refusal(() => read(reader, directory, 0, 10)).message).toMatch(/reading at byte 0 failed \(EISDIR/);
});

function write(folder: string, name = "model.safetensors"): CheckpointFile {
  const path = join(folder, name);
  writeFileSync(path, content);
  return fileAt(path);
}

const fileAt = (path: string): CheckpointFile => ({ path, name: "model.safetensors", size: statSync(path).size });

function read(reader: RangeReader, file: CheckpointFile, offset: number, length: number): Uint8Array {
  const target = new Uint8Array(length);
  reader.read(file, offset, target);
  return target;
}

function refusal(work: () => unknown): UserError {
  try {
    work();
  } catch (error) {
    if (error instanceof UserError && error.code === "bad_model") return error;
    throw error;
  }
  throw new Error("it was accepted");
}

/** Empty where the system does not tell. */
function openPaths(): string[] {
  if (process.platform !== "linux") return [];
  return readdirSync("/proc/self/fd").flatMap((descriptor) => {
    try {
      return [readlinkSync(`/proc/self/fd/${descriptor}`)];
    } catch {
      return []; // that of the listing itself
    }
  });
}
