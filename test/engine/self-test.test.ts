import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { Bench } from "../../src/engine/self-test/bench.ts";
import { SELF_TESTS } from "../../src/engine/self-test/index.ts";
import type { AnyKernel } from "../../src/engine/self-test/self-test.ts";
import { sameAs, within } from "../../src/engine/self-test/verdict.ts";
import * as kernels from "../../src/kernels/index.ts";
import { describeOnDevices } from "../support/device.ts";

/** Every kernel that `src/kernels` exports, alone or in a table of variants. */
const KERNELS = Object.values(kernels as Record<string, unknown>).flatMap(kernelsIn);

function kernelsIn(value: unknown): AnyKernel[] {
  if (typeof value !== "object" || value === null) return [];
  return "source" in value ? [value as AnyKernel] : Object.values(value).flatMap(kernelsIn);
}

describe("the self-test", () => {
  test("has one test for every kernel that there is, under a name of its own", () => {
    const untested = KERNELS.filter((kernel) => SELF_TESTS.filter((one) => one.kernel === kernel).length !== 1);
    expect(untested.map(({ name }) => name)).toEqual([]);
    const names = SELF_TESTS.map(({ name }) => name);
    expect(names.filter((name, index) => names.indexOf(name) !== index)).toEqual([]);
    expect(names).toHaveLength(KERNELS.length);
  });

  test("names the first value that is wrong, with both", () => {
    expect(sameAs([[1, 2]], [[1, 2]])).toBeUndefined();
    expect(sameAs([[1, 2.5]], [[1, 2]])).toBe("row 0, column 1 is 2.5 and should be 2");
    expect(sameAs([[-0]], [[0]])).toBe("row 0, column 0 is -0 and should be 0");
    expect(sameAs([[1]], [[1], [2]])).toBe("1 rows where 2 were expected");
    expect(sameAs([[1]], [[1, 2]])).toBe("row 0 has 1 values, not 2");
    expect(within([[1, 1.001]], [[1, 1]], 1e-2)).toBeUndefined();
    expect(within([[1, 1.1]], [[1, 1]], 1e-2)).toBe("row 0, column 1 is 1.1 and should be 1");
    expect(within([[NaN]], [[1]], 1e-2)).toBe("row 0, column 0 is NaN and should be 1");
  });
});

describeOnDevices("a kernel", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterAll(() => bench.destroy());

  test.each(SELF_TESTS.map((one) => [one.name, one] as const))(
    "that does nothing fails its self-test: %s",
    async (_, one) => {
      expect(await one.run(bench, idle(one.kernel))).toMatch(/is .* and should be /);
      await bench.clear();
    },
    30_000,
  );
});

/** The same kernel, which returns before it does anything. */
function idle(kernel: AnyKernel): AnyKernel {
  const source = kernel.source.replace(/(@compute[^{]*?fn main\([^{]*\)\s*\{)/, "$1 if (true) { return; }");
  expect(source).not.toBe(kernel.source);
  return { ...kernel, source };
}
