import { afterAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { sizeFlag } from "../../src/base/bytes.ts";
import type { UserError } from "../../src/base/errors.ts";
import { byteSize } from "../../src/cli/units.ts";
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
  type Suggestion,
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

  test("under a limit below one layer says what one layer takes, and how far the limit is to be raised", () => {
    const asked = question(GPT2, {}, { ...roomWith(null), limitBytes: 20 * MIB });
    const { hint } = refusalOf(asked);
    expect(hint).toMatch(/^below this limit nothing fits, for even one layer .* needs \d+\.\d MiB/);
    expect(hint).toMatch(/--memory-limit 443\.\dMiB {2}\(raise --memory-limit to at least that, or leave it away\)/);
    expect(suggestionsFor(asked).map(({ change }) => change)).toEqual([{}]);
  });

  test("on a device below one layer says that another device is needed", () => {
    const { hint, details } = refusalOf(question(GPT2, {}, roomWith(40 * MIB)));
    expect(details["suggestions"]).toEqual([]);
    expect(hint).toMatch(/^even one layer .* needs \d+\.\d MiB, .*: take a device with more memory$/);
  });
});

/** What a proposal changes, by flag. */
const kindsOf = ({ change, limitBytes }: Suggestion): string[] => [
  ...(limitBytes === undefined ? [] : ["limit"]),
  ...(change.span ? ["layers"] : []),
  ...(change.encoding ? ["encoding"] : []),
  ...(change.maxSessions === undefined ? [] : ["sessions"]),
  ...(change.maxContext === undefined ? [] : ["context"]),
];

/** The same with one of its changes left away, and one of its numbers a step nearer to what was asked. */
function milder(asked: FitQuestion, { change, limitBytes }: Suggestion) {
  const { options } = asked.load;
  const unlimited = { ...asked.room, limitBytes: undefined };
  const room = limitBytes === undefined ? asked.room : unlimited;
  const without = (Object.keys(change) as (keyof StageOptions)[]).map((key) => {
    const { [key]: _, ...rest } = change as Record<string, unknown>;
    return { change: rest as Partial<StageOptions>, room };
  });
  if (limitBytes !== undefined) without.push({ change, room: asked.room });
  const next: Partial<StageOptions>[] = [];
  const { span, maxSessions, maxContext, encoding } = change;
  if (span && span.end + 1 < options.span.end) next.push({ span: { ...span, end: span.end + 1 } });
  if (maxSessions !== undefined && maxSessions + 1 < options.maxSessions) next.push({ maxSessions: maxSessions + 1 });
  if (maxContext !== undefined && maxContext + 32 < options.maxContext) next.push({ maxContext: maxContext + 32 });
  if (encoding === "nf4" && options.encoding === "bf16") next.push({ encoding: "int8" });
  return [...without, ...next.map((one) => ({ change: { ...change, ...one }, room }))];
}

describe("every proposal", () => {
  const wishes: Wish[] = [
    {},
    { maxSessions: 38 },
    { maxSessions: 160 },
    { maxSessions: 1 },
    { maxContext: 96, maxSessions: 9 },
    { start: 3, end: 4 },
    { encoding: "int8" },
    { encoding: "nf4", end: 2 },
  ];
  const limits = [20, 64.3, 90, 120, 150, 200, 256, 300, 383.7, 440, 1000];
  test.each(
    [GPT2, TINY].flatMap((directory) => wishes.map((wish) => ({ directory, wish, what: JSON.stringify(wish) }))),
  )("is as mild as it can be, and has nothing in it that it fits without ($what)", ({ directory, wish }) => {
    const scale = directory === TINY ? 1 / 16 : 1;
    for (const limit of limits) {
      for (const room of [{ limitBytes: limit * scale * MIB }, roomWith((limit * scale + 64) * MIB)]) {
        const asked = question(directory, wish, { ...roomWith(2 ** 40), maxBindingBytes: 128 * MIB, ...room });
        if (fits(asked.load, asked.room)) continue;
        const suggestions = suggestionsFor(asked);
        const kinds = suggestions.map((one) => kindsOf(one));
        for (const suggestion of suggestions) {
          const raised = suggestion.limitBytes ?? asked.room.limitBytes;
          expect(fits(asked.replan(suggestion.change), { ...asked.room, limitBytes: raised })).toBe(true);
          for (const { change, room } of milder(asked, suggestion))
            expect(fits(asked.replan(change), room)).toBe(false);
          const more = kinds.filter((some) => kindsOf(suggestion).every((kind) => some.includes(kind)));
          expect(more).toEqual([kindsOf(suggestion)]); // none is another one with more to it
        }
        // A single change that fits is left away only where three others are there.
        const singles = [{ maxSessions: 1 }, { maxContext: 32 }, { encoding: "nf4" }] as const;
        const { load } = asked;
        for (const change of singles) {
          const [key] = Object.keys(change) as ["maxSessions" | "maxContext" | "encoding"];
          if (load.options[key] === change[key as never] || !fits(asked.replan(change), asked.room)) continue;
          const isThere = suggestions.some((one) => Object.keys(one.change).join() === key);
          expect(isThere || (suggestions.length === 3 && kinds.every(({ length }) => length === 1))).toBe(true);
        }
      }
    }
  });

  test("for too small a limit is to raise it as well, to the least tenth of a MiB that is enough", () => {
    const asked = question(TINY, {}, { ...roomWith(2 ** 34), limitBytes: 10 * MIB });
    const raise = suggestionsFor(asked).find(({ limitBytes }) => limitBytes !== undefined)!;
    const { peakBytes } = memoryPlan(asked.load, asked.room.adapter);
    expect(raise.limitBytes).toBeWithin(peakBytes, peakBytes + MIB / 10);
    expect(raise.flags).toEqual(["--memory-limit", `${Number((raise.limitBytes! / MIB).toFixed(1))}MiB`]);
    expect(byteSize("--memory-limit", raise.flags[1]!)).toBe(raise.limitBytes!);
  });

  test("for a piece that is too large to be bound names what makes it smaller, and not what does nothing for it", () => {
    const asked = question(GPT2, { maxSessions: 160 }, { ...roomWith(2 ** 40), maxBindingBytes: 128 * MIB });
    expect(refusalOf(asked).message).toMatch(
      /^a layer's cache of 160 sequences of 1024 tokens \(--max-sessions, --max-context\) needs 240\.0 MiB in one piece, and GPU binds at most 128\.0 MiB\n/,
    );
    expect(suggestionsFor(asked).map(({ flags }) => flags)).toEqual([
      ["--max-sessions", "85"],
      ["--max-context", "544"],
    ]);
  });
});

test.each(["256MiB", "1.5GiB", "2TiB", "500MB", "768", "402653185", "383.7MiB", "19.1MiB"])(
  "a size is given back as a flag with no byte lost: %s",
  (size) => {
    const bytes = byteSize("--memory-limit", size);
    expect(byteSize("--memory-limit", sizeFlag(bytes))).toBe(bytes);
    if (/^[\d.]+[MGT]iB$/.test(size) && !size.includes(".7") && !size.includes(".1"))
      expect(sizeFlag(bytes)).toBe(size);
  },
);

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
