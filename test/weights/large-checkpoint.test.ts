import { afterAll, expect, test } from "bun:test";
import { renameSync, rmSync } from "node:fs";
import { join } from "node:path";
import { INDEX_FILE, SINGLE_FILE } from "../../src/safetensors/checkpoint.ts";
import { writeLargeCheckpoint } from "../support/large-checkpoint.ts";
import type { OpenMeasurement } from "../support/measure-open.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

const layers = 16_667;
const shards = 160;
const tensors = 12 * layers + 4;

test.each([
  { start: 0, end: 2, planned: 2 + 2 * 12 },
  { start: 8000, end: 8003, planned: 3 * 12 },
  { start: layers - 2, end: layers, planned: 2 * 12 + 2 + 1 }, // the tail reads the embedding as its head
])(
  `of 200,008 tensors in 160 shards, layers $start-$end are planned within seconds and 300 MB, and nothing else is kept`,
  async ({ start, end, planned }) => {
    written ??= writeLargeCheckpoint(folder.path, layers, shards);
    expect(written).toBe(tensors);
    const measured = await measureOpen(start, end);
    console.log(measured);
    expect(measured).toMatchObject({ planned, kept: planned });
    expect(measured.shards).toBeLessThanOrEqual(3);
    expect(measured.peakBytes).toBeLessThan(300 * 1e6);
    expect(measured.seconds).toBeLessThan(20); // about 1 second on an idle machine
  },
  120_000,
);

test.skipIf(!process.env.LONG_TESTS)(
  "of 200,008 tensors in one file, layers 0-2 are planned within 400 MB", // its header alone has 26
  async () => {
    const one = join(folder.path, "one");
    writeLargeCheckpoint(one, layers, 1);
    renameSync(join(one, "model-00001-of-00001.safetensors"), join(one, SINGLE_FILE));
    rmSync(join(one, INDEX_FILE));
    const measured = await measureOpen(0, 2, one);
    console.log(measured);
    expect(measured.kept).toBe(2 + 2 * 12);
    expect(measured.peakBytes).toBeLessThan(400 * 1e6);
  },
  120_000,
);

let written: number | undefined;

async function measureOpen(start: number, end: number, directory = folder.path): Promise<OpenMeasurement> {
  const script = join(import.meta.dir, "../support/measure-open.ts");
  const child = Bun.spawn([process.execPath, script, directory, `${start}`, `${end}`], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const output = await new Response(child.stdout).text();
  expect(await child.exited).toBe(0);
  return JSON.parse(output);
}
