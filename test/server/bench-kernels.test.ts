import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import type { KernelBenchmark } from "../../src/server/bench-kernels.ts";
import { softwareDevices } from "../support/device.ts";

const device = softwareDevices.find(({ adapter }) => adapter !== undefined);
const words = ["--device", device?.adapter ?? "", "--runs", "2", "--shapes", "96x64"];

describe.skipIf(!device)("meshnet bench kernels", () => {
  test("tells the speed of gemv and gemm in each encoding, and how it was measured", async () => {
    const { code, stdout } = await run(...words);
    expect(code).toBe(0);
    expect(stdout).toMatch(/^device +\S/m);
    expect(stdout).toMatch(/^method +2 rounds[^]*onSubmittedWorkDone; no timestamp queries/m);
    for (const kernel of ["gemv +1 ", "gemm +32 ", "gemm +128 "]) {
      for (const encoding of ["bfloat16", "int8", "nf4"]) {
        expect(stdout).toMatch(new RegExp(`^${kernel} +96x64 +${encoding}( +[\\d.e-]+){4} x$`, "m"));
      }
    }
  }, 120_000);

  test("tells the same as JSON, with figures that fit each other", async () => {
    const { code, stdout } = await run(...words, "--json");
    const { timings, ...head } = JSON.parse(stdout) as KernelBenchmark;
    expect({ code, head }).toMatchObject({ code: 0, head: { runs: 2, device: device!.adapter } });
    expect(timings.map(({ kernel, rows, encoding }) => `${kernel} ${rows} ${encoding}`)).toEqual(
      ["gemv 1", "gemm 32", "gemm 128"].flatMap((one) =>
        ["bf16", "int8", "nf4"].map((encoding) => `${one} ${encoding}`),
      ),
    );
    const bytes: Record<string, number> = { bf16: 96 * 64 * 2, int8: 96 * 64 + 96 * 4, nf4: (96 * 64) / 2 + 96 * 4 };
    for (const { encoding, weightBytes, seconds, rows, ...rates } of timings) {
      expect(weightBytes).toBe(bytes[encoding]!);
      expect(seconds).toBeGreaterThan(0);
      expect(rates.gigabytesPerSecond).toBeCloseTo(weightBytes / seconds / 1e9, 9);
      expect(rates.gigaflopsPerSecond).toBeCloseTo((2 * rows * 96 * 64) / seconds / 1e9, 9);
    }
  }, 120_000);
});

test.skipIf(!device)("meshnet bench kernels refuses a weight that the device cannot bind", async () => {
  const { code, stderr } = await run("--device", device!.adapter!, "--shapes", "999999x99999");
  expect({ code, stderr }).toEqual({
    code: 3,
    stderr: expect.stringMatching(/a weight of 186\.\d GiB .* binds at most/),
  });
});

test.each([
  [["--shapes", "768"], "--shapes 768 is not a shape"],
  [["--shapes", "0x8"], "--shapes 0x8 is not a shape"],
  [["--shapes", ","], "--shapes is empty"],
  [["--runs", "0"], "--runs 0 is not a whole number from 1 to 1000"],
])("meshnet bench kernels %p is refused with what would be right", async (wrong, problem) => {
  const { code, stderr } = await run(...wrong);
  expect({ code, stderr }).toEqual({ code: 2, stderr: expect.stringContaining(problem) });
});

async function run(...flags: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  const child = Bun.spawn(
    [process.execPath, join(import.meta.dir, "../../src/index.ts"), "bench", "kernels", ...flags],
    {
      stdio: ["ignore", "pipe", "pipe"],
    },
  );
  const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  return { code: await child.exited, stdout, stderr };
}
