import type { Device } from "../../gpu/device.ts";
import { messageOf } from "../../base/errors.ts";
import { Bench } from "./bench.ts";
import { ATTENTION_TESTS } from "./attention.ts";
import { EXPERT_TESTS } from "./experts.ts";
import { LATENT_TESTS } from "./latent.ts";
import { LLM_INT8_TESTS } from "./llm-int8.ts";
import { ROW_TESTS } from "./rows.ts";
import type { SelfTest } from "./self-test.ts";
import { WEIGHT_TESTS } from "./weights.ts";

export type { SelfTest } from "./self-test.ts";

/** Every kernel of `src/kernels`, against its plain version. A test holds the list against `kernels/index.ts`. */
export const SELF_TESTS: readonly SelfTest[] = [
  ...ROW_TESTS,
  ...ATTENTION_TESTS,
  ...LATENT_TESTS,
  ...WEIGHT_TESTS,
  ...EXPERT_TESTS,
  ...LLM_INT8_TESTS,
];

export interface SelfTestResult {
  readonly kernel: string;
  readonly status: "ok" | "fail" | "skip";
  /** What is wrong, or why the device cannot run it. */
  readonly reason: string | null;
}

export interface SelfTestOptions {
  /** Hears of each kernel before it runs: a driver may crash in it. */
  readonly onStart?: (kernel: string) => void;
  /** Only these few, which show that the device computes at all: compiling all kernels takes seconds. */
  readonly quick?: boolean;
}

const QUICK = ["add", "argmax", "gemv_bf16"];

/** Runs one kernel after another. */
export async function* runSelfTests(
  device: Device,
  { onStart = () => {}, quick = false }: SelfTestOptions = {},
): AsyncGenerator<SelfTestResult> {
  const bench = new Bench(device);
  try {
    for (const test of SELF_TESTS.filter(({ name }) => !quick || QUICK.includes(name))) {
      const missing = await test.missing(device);
      if (missing === undefined) onStart(test.name);
      const wrong = missing ?? (await verdictOf(test, bench));
      const status = missing !== undefined ? "skip" : wrong === undefined ? "ok" : "fail";
      yield { kernel: test.name, status, reason: wrong ?? null };
    }
  } finally {
    bench.destroy();
  }
}

/** A kernel that does not compile, or an error that the device reports, is a failed test like a wrong result. */
async function verdictOf(test: SelfTest, bench: Bench): Promise<string | undefined> {
  const errorsBefore = bench.device.uncapturedErrors;
  try {
    const wrong = await test.run(bench);
    await bench.clear();
    const errors = bench.device.uncapturedErrors - errorsBefore;
    return wrong ?? (errors > 0 ? `the device reported ${errors} errors while it ran` : undefined);
  } catch (error) {
    await bench.clear();
    return messageOf(error);
  }
}
