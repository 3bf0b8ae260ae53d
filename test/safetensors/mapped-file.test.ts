import { expect, test } from "bun:test";
import {
  chmodSync,
  closeSync,
  ftruncateSync,
  openSync,
  readFileSync,
  truncateSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { join } from "node:path";
import { convertToBf16 } from "../../src/quant/bf16.ts";
import { mapRange, MAX_RANGE_BYTES, read } from "../../src/safetensors/mapped-file.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const content = Uint8Array.from({ length: 200_000 }, (_, i) => (i * 7) % 251);

test.each([
  [0, 200_000],
  [1, 10], // unaligned to everything
  [65_535, 2], // across the boundary that mappings begin at
  [131_072, 4096],
  [199_999, 1],
  [200_000, 0],
  [5, 0], // an empty tensor
])("the range from %d on of %d bytes is the file's", (offset, length) => {
  using folder = temporaryFolder();
  const path = write(folder.path, content);
  using range = mapRange(path, offset, length);
  expect(range.bytes).toEqual(content.subarray(offset, offset + length));
});

test("a positioned read, where nothing can be mapped, gives the same bytes", () => {
  using folder = temporaryFolder();
  const file = openSync(write(folder.path, content), "r");
  using range = read(file, 65_535, 1000);
  expect(range.bytes).toEqual(content.subarray(65_535, 66_535));
  closeSync(file);
});

test("an unaligned float tensor converts straight from its mapping", () => {
  using folder = temporaryFolder();
  const path = write(folder.path, new Uint8Array([9, ...new Uint8Array(Float32Array.of(1, -2.5, 3).buffer)]));
  using range = mapRange(path, 1, 12);
  const target = new Uint16Array(3);
  convertToBf16("F32", range.bytes, target);
  expect([...target]).toEqual([0x3f80, 0xc020, 0x4040]);
});

test("a file that may only be read is mapped", () => {
  using folder = temporaryFolder();
  const path = write(folder.path, content);
  chmodSync(path, 0o400);
  using range = mapRange(path, 10, 5);
  expect(range.bytes).toEqual(content.subarray(10, 15));
});

test("a range past the end is refused with both numbers", () => {
  using folder = temporaryFolder();
  const path = write(folder.path, content);
  truncateSync(path, 100);
  expect(() => mapRange(path, 90, 20)).toThrow("model.safetensors: bytes 90-110 are wanted, and the file has 100");
});

test("a missing file is refused by name", () => {
  expect(() => mapRange("/nowhere/model.safetensors", 0, 1)).toThrow("/nowhere/model.safetensors cannot be opened");
});

test("a range beyond 4 GiB of a large file is mapped, and one of more than 4 GiB is a mistake of the caller", () => {
  using folder = temporaryFolder();
  const path = join(folder.path, "model.safetensors");
  const file = openSync(path, "w");
  ftruncateSync(file, 5 * 2 ** 30);
  writeSync(file, Uint8Array.of(1, 2, 3), 0, 3, 2 ** 32 + 12_345);
  closeSync(file);
  using range = mapRange(path, 2 ** 32 + 12_344, 5);
  expect([...range.bytes]).toEqual([0, 1, 2, 3, 0]);
  expect(() => mapRange(path, 1, MAX_RANGE_BYTES)).toThrow(RangeError);
});

test("disposal unmaps, and the bytes cannot be asked for again", () => {
  using folder = temporaryFolder();
  const path = write(folder.path, content);
  const range = mapRange(path, 0, 100);
  const mapped = () => process.platform === "linux" && readFileSync("/proc/self/maps", "utf8").includes(path);
  expect(mapped()).toBe(process.platform === "linux");
  range[Symbol.dispose]();
  range[Symbol.dispose](); // twice harms nothing
  expect(mapped()).toBe(false);
  expect(() => range.bytes).toThrow("after its disposal");
});

function write(folder: string, bytes: Uint8Array): string {
  const path = join(folder, "model.safetensors");
  writeFileSync(path, bytes);
  return path;
}
