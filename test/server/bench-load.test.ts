import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { softwareDevices } from "../support/device.ts";
import { TINY, variant } from "../support/oracle.ts";

const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

describe.skipIf(!device)("meshnet bench load", () => {
  test.each([TINY, variant("odd-head"), variant("sharded")])(
    "tells the speed of reading, of uploading and of loading, and the memory that it took: %s",
    async (directory) => {
      const { code, stdout } = await run("load", "--model-id", directory, "--device", device!.adapter!, "--runs", "2");
      expect(code).toBe(0);
      expect(stdout).toMatch(/^device +\S/m);
      expect(stdout).toMatch(/^method .* 2 runs of each way in turn/m);
      for (const way of ["read", "read, upload", "load"]) {
        expect(stdout).toMatch(new RegExp(`^${way} +\\d+\\.\\d\\d GB/s \\(\\d+\\.\\d\\d-\\d+\\.\\d\\d\\) `, "m"));
      }
      expect(stdout).toMatch(/^time of load +\d+\.\d\d × read and upload \(goal: at most 1\.2\)$/m);
      expect(stdout).toMatch(/^host memory +\S/m);
    },
    60_000,
  );
});

test.each([
  [["load", "--model-id", "/nowhere"], "--model-id /nowhere is not a directory with a config.json"],
  [["speed", "--model-id", TINY], "unknown benchmark speed"],
  [["load", "--model-id", TINY, "--runs", "0"], "--runs 0 is not a whole number from 1 to 1000"],
])("meshnet bench %p is refused with what is known", async (words, problem) => {
  const { code, stderr } = await run(...words);
  expect(stderr).toContain(problem);
  expect(code).toBe(2);
});

async function run(...words: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  const child = Bun.spawn([process.execPath, join(import.meta.dir, "../../src/index.ts"), "bench", ...words], {
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  return { code: await child.exited, stdout, stderr };
}
