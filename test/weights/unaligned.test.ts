import { afterAll, describe, expect, test } from "bun:test";
import { closeSync, copyFileSync, mkdirSync, openSync, readFileSync, statSync, writeSync } from "node:fs";
import { basename, join } from "node:path";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { softwareDevices } from "../support/device.ts";
import { TINY, variant } from "../support/oracle.ts";
import { fileWithHeader, temporaryFolder } from "../support/safetensors.ts";
import { bits, idsInput, openFixture } from "../support/stages.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** One is enough: what differs happens before the device. SwiftShader takes a minute to compile it all. */
const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

describe.skipIf(!device)("a model gives the same logits, bit for bit,", () => {
  test.each([
    { weights: "as float32, behind 4 GiB of other data and", directory: TINY, gap: 2 ** 32 },
    { weights: "as float32 and", directory: TINY, gap: 0 },
    { weights: "as bfloat16, in rows of 75, and", directory: variant("odd-head"), gap: 0 },
    { weights: "as float16 and", directory: variant("f16"), gap: 0 },
  ])(
    "where its weights are $weights at odd bytes",
    async ({ directory, gap }) => {
      const opened = await device!.open();
      const moved = moveToOddBytes(directory, join(folder.path, `${basename(directory)}-${gap}`), gap);
      const stages = [await openFixture(opened, directory), await openFixture(opened, moved)];
      const input = idsInput([1, 2, 3, 5, 8, 13, 21, 34]);
      const [expected, actual] = [await bits([stages[0]!], input, "logits"), await bits([stages[1]!], input, "logits")];
      for (const stage of stages) stage.destroy();
      expect(actual.length).toBeGreaterThan(0);
      expect(Buffer.from(actual.buffer).equals(Buffer.from(expected.buffer))).toBe(true);
    },
    60_000,
  );
});

/** A copy whose header has an odd length, with a hole of `gap` bytes in front of its tensors. */
function moveToOddBytes(directory: string, copy: string, gap: number): string {
  mkdirSync(copy);
  copyFileSync(join(directory, "config.json"), join(copy, "config.json"));
  const { files, tensors } = openCheckpoint(directory);
  const original = readFileSync(files[0]!.path);
  const begin = Math.min(...[...tensors.values()].map((tensor) => tensor.begin));
  const header: Record<string, unknown> = { gap: { dtype: "U8", shape: [gap], data_offsets: [0, gap] } };
  for (const [name, tensor] of tensors) {
    const offsets = [tensor.begin, tensor.end].map((at) => at - begin + gap);
    header[name] = { dtype: tensor.dtype, shape: tensor.shape, data_offsets: offsets };
  }
  const text = JSON.stringify(header);
  const start = fileWithHeader(text.length % 2 === 0 ? `${text} ` : text);
  const path = join(copy, basename(files[0]!.path));
  const file = openSync(path, "w");
  writeSync(file, start);
  writeSync(file, original, begin, original.length - begin, start.length + gap);
  closeSync(file);
  expect(statSync(path).size).toBe(start.length + gap + original.length - begin);
  for (const tensor of openCheckpoint(copy).tensors.values()) {
    if (tensor.name !== "gap" && tensor.begin % 2 === 0) throw new Error(`${tensor.name} is at an even byte`);
  }
  return copy;
}
