import { afterAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { memoryPlan } from "../../src/weights/memory-plan.ts";
import { softwareDevices } from "../support/device.ts";
import { deviceMeter } from "../support/device-meter.ts";
import { FIXTURES, TINY } from "../support/oracle.ts";
import { idsInput, openFixture, planFixture, type StageRange } from "../support/stages.ts";

const meter = await deviceMeter();
afterAll(() => meter[Symbol.dispose]());

const SPANS = [
  { part: "whole model", start: 0, end: 4 },
  { part: "head", start: 0, end: 2 },
  { part: "middle", start: 1, end: 3 },
  { part: "tail", start: 2, end: 4 },
];
const ENCODINGS = ["bf16", "int8", "nf4"] as const;
const stored = (name: string) => ({ directory: join(FIXTURES, "bnb/checkpoints", name), encoding: "bf16" as const });
const family = (name: string) => join(FIXTURES, "families", name);
const RANGES: (StageRange & { name: string; directory?: string })[] = [
  ...ENCODINGS.flatMap((encoding) =>
    SPANS.map(({ part, ...span }) => ({ name: `${part} in ${encoding}`, encoding, ...span })),
  ),
  { name: "checkpoint that is nf4 already", ...stored("nf4") },
  { name: "checkpoint that is int8 already", ...stored("int8") },
  ...ENCODINGS.map((encoding) => ({
    name: `mixture of experts in ${encoding}`,
    directory: family("qwen3_moe"),
    encoding,
  })),
  { name: "mixture whose experts are split", directory: family("qwen2_moe"), maxBindingBytes: 1024 },
  { name: "span with a cache of latents", directory: family("deepseek_v3"), start: 1, end: 3, encoding: "int8" },
  { name: "checkpoint in FP8", directory: family("deepseek_v3-fp8"), encoding: "nf4" },
  { name: "model whose weights are split to be bound", encoding: "nf4", maxBindingBytes: 100_000 },
];

/** Bytes are the same on every driver: the first one here will do. */
const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

describe.skipIf(!device)(`what the plan says is what is allocated (${device?.name ?? "no device here"})`, () => {
  test.each(RANGES)(
    "of a $name",
    async ({ directory = TINY, ...range }) => {
      const opened = await device!.open();
      const plan = memoryPlan(planFixture(directory, range).plan);
      const before = meter.liveBytes;
      meter.reset();
      const stage = await openFixture(opened, directory, range);
      expect(meter.peakBytes - before).toBeLessThanOrEqual(plan.peakBytes);
      const { span, maxContext, hiddenSize } = stage.info;
      const tokens = Array.from({ length: maxContext }, (_, position) => position);
      const input =
        span.start === 0
          ? idsInput(tokens)
          : { ...idsInput(tokens), kind: "hidden" as const, hidden: new Uint16Array(maxContext * hiddenSize) };
      await stage.forward(input, span.end === span.total ? "all_logits" : "hidden");
      // To the byte, which is more than the two percent that are promised.
      expect([stage.allocatedBytes, meter.liveBytes - before]).toEqual([plan.plannedBytes, plan.plannedBytes]);
      stage.destroy();
      expect(meter.liveBytes).toBe(before);
    },
    60_000,
  );
});
