import { afterAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { UserError } from "../../src/base/errors.ts";
import { proveRoom } from "../../src/engine/prove-room.ts";
import { readModel, type StageOptions } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import {
  checkFit,
  fitQuestion,
  fits,
  type FitQuestion,
  largestEnd,
  refusedByDriver,
  replanOf,
  type Room,
  suggestionsFor,
} from "../../src/server/fit.ts";
import { memoryPlan } from "../../src/weights/memory-plan.ts";
import { planLoad } from "../../src/weights/plan.ts";
import { softwareDevices } from "../support/device.ts";
import { GPT2_124M, writeEmptyGpt2 } from "../support/empty-gpt2.ts";
import { FailingDevice } from "../support/failing-device.ts";
import { FIXTURES, TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const MIB = 2 ** 20;
const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());
const GPT2 = writeEmptyGpt2(join(folder.path, "gpt2"), GPT2_124M);

interface Wish extends Partial<Omit<StageOptions, "span">> {
  readonly start?: number;
  readonly end?: number;
}

/** What `meshnet node` asks of a device with so much free. */
function question(directory: string, { start, end, ...rest }: Wish, room: Partial<Room>): FitQuestion {
  const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const span = { start: start ?? 0, end: end ?? config.layers, total: config.layers };
  const options = { maxContext: config.maxPositions, maxSessions: 4, encoding: "bf16" as const, ...rest, span };
  const checkpoint = openCheckpoint(directory);
  const load = planLoad(family, config, options, checkpoint);
  return {
    load,
    replan: replanOf({ family, config, checkpoint, load }),
    room: { ...roomWith(null), ...room },
    mayQuantize: fitQuestion({ family, config, checkpoint, load }, roomWith(null)).mayQuantize,
  };
}

const roomWith = (availableBytes: number | null): Room => ({
  adapter: { name: "GPU", isSoftware: false },
  memory: { totalBytes: availableBytes, availableBytes, source: "a test", isEstimate: false },
  maxBindingBytes: 2 ** 31,
});

function refusalOf(asked: FitQuestion): UserError {
  try {
    checkFit(asked);
  } catch (error) {
    return error as UserError;
  }
  throw new Error("it fits");
}

describe("a plan that does not fit", () => {
  test.each(
    [60, 100, 130, 160, 200, 256, 300, 400, 450, 500].flatMap((free) =>
      [
        { free, wish: {} },
        { free, wish: { start: 3, end: 9 } },
        { free, wish: { start: 6, maxSessions: 1 } },
        { free, wish: { encoding: "int8", int8Activations: true } },
        { free, wish: { encoding: "nf4", maxSessions: 1 } },
      ].map((one) => ({ ...one, what: JSON.stringify(one.wish) })),
    ),
  )("comes with at most three changes, each of which the planner finds to fit ($free MiB, $what)", ({ free, wish }) => {
    const asked = question(GPT2, wish as Wish, roomWith(free * MIB));
    const suggestions = suggestionsFor(asked);
    expect(suggestions.length).toBeLessThanOrEqual(3);
    expect(new Set(suggestions.map(({ flags }) => flags.join(" "))).size).toBe(suggestions.length);
    for (const { change, neededBytes } of suggestions) {
      const plan = asked.replan(change);
      expect(fits(plan, asked.room)).toBe(true);
      expect(neededBytes).toBe(memoryPlan(plan, asked.room.adapter).neededBytes);
      expect(neededBytes).toBeLessThanOrEqual(free * MIB);
      expect(change.span?.start ?? asked.load.options.span.start).toBe(asked.load.options.span.start);
      if (!asked.mayQuantize) expect(change.encoding).toBeUndefined();
    }
  });

  test("is offered the largest end that fits, the mildest encoding, the most sequences", () => {
    const asked = question(GPT2, {}, roomWith(470 * MIB));
    const [layers, encoding, sessions] = suggestionsFor(asked);
    const span = layers!.change.span!;
    expect(fits(asked.replan({ span: { ...span, end: span.end + 1 } }), asked.room)).toBe(false);
    expect(largestEnd(asked.replan, asked.load.options.span, asked.room)).toBe(span.end);
    expect(encoding!.flags).toEqual(["--quantization", "int8"]);
    const { maxSessions } = sessions!.change;
    expect(fits(asked.replan({ maxSessions: maxSessions! + 1 }), asked.room)).toBe(false);
  });

  test("says what is missing in the words of whatever is too small", () => {
    const memory = refusalOf(question(GPT2, {}, roomWith(400 * MIB)));
    expect(memory.message).toMatch(/^layers 0-12 need 507\.\d MiB, and GPU has 400\.0 MiB\n/);
    expect(memory.message).toContain("GPU has 400.0 MiB free of 400.0 MiB (a test)");
    const limit = refusalOf(question(GPT2, {}, { ...roomWith(2 ** 40), limitBytes: 300 * MIB }));
    expect(limit.message).toMatch(/^layers 0-12 need 443\.\d MiB on the device, and --memory-limit is 300\.0 MiB\n/);
    const binding = refusalOf(question(GPT2, {}, { maxBindingBytes: 8 * MIB }));
    expect(binding.message).toMatch(/needs 12\.\d MiB in one piece, and GPU binds at most 8\.0 MiB\n/);
    for (const error of [memory, limit, binding]) expect(error.code).toBe("does_not_fit");
  });

  test("with the limit below one layer says what one layer takes", () => {
    const { hint, details } = refusalOf(question(GPT2, {}, { ...roomWith(null), limitBytes: 20 * MIB }));
    expect(details["suggestions"]).toEqual([]);
    expect(hint).toMatch(/even one layer .* needs \d+\.\d MiB/);
  });
});

test("a plan fits to the byte, and not with a byte less", () => {
  const asked = question(GPT2, {}, {});
  const { neededBytes, peakBytes } = memoryPlan(asked.load, asked.room.adapter);
  expect(fits(asked.load, roomWith(neededBytes))).toBe(true);
  expect(fits(asked.load, roomWith(neededBytes - 1))).toBe(false);
  expect(fits(asked.load, { ...roomWith(neededBytes), limitBytes: peakBytes })).toBe(true);
  expect(fits(asked.load, { ...roomWith(neededBytes), limitBytes: peakBytes - 1 })).toBe(false);
});

test("where nobody tells how much memory there is, only the limit counts", () => {
  const asked = question(GPT2, {}, { ...roomWith(null) });
  expect(fits(asked.load, asked.room)).toBe(true);
  expect(fits(asked.load, { ...asked.room, limitBytes: 100 * MIB })).toBe(false);
});

test("a checkpoint that is quantized already is not offered to be quantized", () => {
  const directory = join(FIXTURES, "bnb/checkpoints/nf4");
  const asked = question(directory, {}, { ...roomWith(null), limitBytes: 17 * MIB });
  expect(asked.mayQuantize).toBe(false);
  const suggestions = suggestionsFor(asked);
  expect(suggestions.length).toBeGreaterThan(0);
  expect(suggestions.flatMap(({ flags }) => flags)).not.toContain("--quantization");
});

const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

describe.skipIf(!device)(`a driver that refuses what seemed to be there (${device?.name ?? "no device here"})`, () => {
  test.each([0, 3, 20, 60])(
    "ends in the same refusal, before a weight is read, and all is given back (%p)",
    async (nth) => {
      using failing = await FailingDevice.open(device!, () => {});
      const asked = question(TINY, {}, roomWith(2 ** 34));
      failing.failAt("buffer", nth);
      const { grantedBytes, refusal } = await proveRoom(failing.device, asked.load);
      expect(refusal).toBeString();
      expect(grantedBytes).toBeWithin(0, memoryPlan(asked.load).peakBytes);
      expect([failing.alive, failing.isReclaimed]).toEqual([[], true]);

      const error = refusedByDriver(asked, grantedBytes, refusal!);
      expect(error.code).toBe("does_not_fit");
      expect(error.message).toContain("its driver gave no more");
      expect(error.message).toMatch(/^ {2}weights +layers 0-4, bfloat16 /m);
      for (const flags of error.details["suggestions"] as string[][]) expect(flags[0]).toStartWith("--");
    },
  );

  test("is not met where it refuses nothing: the whole plan is granted, and given back", async () => {
    using failing = await FailingDevice.open(device!, () => {});
    const { load } = question(TINY, {}, {});
    const { grantedBytes, refusal } = await proveRoom(failing.device, load);
    expect(refusal).toBeUndefined();
    expect(grantedBytes).toBeWithin(memoryPlan(load).peakBytes, memoryPlan(load).peakBytes * 1.001);
    expect([failing.alive, failing.isReclaimed]).toEqual([[], true]);
  });
});
