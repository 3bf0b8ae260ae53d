import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { softwareDevices } from "../support/device.ts";
import type { LoadMeasurement } from "../support/measure-load.ts";
import { FIXTURES } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const MIB = 2 ** 20;
const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** Lavapipe alone: its device memory shows apart, and SwiftShader's compiler takes more than any loading. */
const lavapipe = softwareDevices.find(({ name }) => name === "lavapipe")!;
const isMissing = lavapipe.adapter === undefined || process.platform !== "linux";

const CHECKPOINTS = [
  { name: "GPT-2's 124M parameters", layers: 12, hidden: 768, isLong: false },
  { name: "tensors of up to 823 MB", layers: 1, hidden: 4096, isLong: true },
].filter(({ isLong }) => !isLong || process.env.LONG_TESTS);

test.skipIf(isMissing).each(CHECKPOINTS)(
  `a checkpoint with $name loads with less than 64 MiB beside what the device holds (lavapipe${isMissing ? " is not on this machine" : ""})`,
  async ({ layers, hidden }) => {
    const directory = join(folder.path, `${layers}x${hidden}`);
    await bun(join(FIXTURES, "gpt2-124m.ts"), directory, `${layers}`, `${hidden}`);
    const load = async (): Promise<LoadMeasurement> =>
      JSON.parse(await bun(join(import.meta.dir, "../support/measure-load.ts"), directory, lavapipe.adapter!));
    const [first, second] = [await load(), await load()];
    console.log(second);
    for (const measured of [first, second]) {
      expect(measured.peakOverIdle - measured.plannedBytes).toBeLessThan(64 * MIB);
      expect(measured.allocatedBytes / measured.plannedBytes).toBeWithin(1, 1.02);
    }
    // Against what of the plan is resident, too: activations that nothing has touched are not. At the very first load the
    // driver compiles the kernel that turns weights, which takes it some 20 MiB; from then on it has that in its cache.
    expect(second.peakOverIdle - second.deviceResident).toBeLessThan(64 * MIB);
  },
  300_000,
);

async function bun(...words: string[]): Promise<string> {
  const child = Bun.spawn([process.execPath, ...words], { stdio: ["ignore", "pipe", "inherit"] });
  const output = await new Response(child.stdout).text();
  expect(await child.exited).toBe(0);
  return output;
}
