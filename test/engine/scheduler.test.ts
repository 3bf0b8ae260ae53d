import { describe, expect, test } from "bun:test";
import { Pace } from "../../src/engine/pace.ts";
import { type Job, Scheduler, type SchedulerOptions, type Slice } from "../../src/engine/scheduler.ts";
import type { Step, StepOutput } from "../../src/engine/types.ts";
import { seededRandom } from "../support/safetensors.ts";

/** A scheduler whose passes are written down, and take as long on its clock as `msOf` says. */
function setUp(options: Partial<SchedulerOptions> = {}, msOf: (tokens: number) => number = () => 1) {
  const passes: { name: string; first: number; tokens: number; want: string }[][] = [];
  let clock = 0;
  const scheduler = new Scheduler({
    passTokens: 64,
    maxRows: 8,
    now: () => clock,
    run: async (slices) => {
      passes.push(slices.map(({ job, first, tokens, want }) => ({ name: nameOf(job), first, tokens, want })));
      clock += msOf(slices.reduce((total, { tokens }) => total + tokens, 0));
      return slices.map(give);
    },
    ...options,
  });
  return { scheduler, passes, advance: (ms: number) => void (clock += ms) };
}

const names = new WeakMap<Job, string>();
const nameOf = (job: Job): string => names.get(job)!;

function job(name: string, tokens: number, step: Partial<Step> = {}): Job {
  const input = step.input ?? ({ kind: "ids", ids: new Int32Array(tokens) } as const);
  const made: Job = {
    tokens,
    step: { positionStart: 0, want: "token", ...step, input },
    begin: () => {},
    pages: () => [],
    history: () => undefined,
  };
  names.set(made, name);
  return made;
}

/** The token is the position behind the slice; hidden states are the positions of its tokens. */
const give = ({ job, first, tokens, want }: Slice): StepOutput =>
  want === "hidden"
    ? { kind: "hidden", values: Uint16Array.from({ length: tokens }, (_, i) => first + i) }
    : want === "token"
      ? { kind: "token", id: job.step.positionStart + first + tokens }
      : { kind: "none" };

describe("the scheduler", () => {
  test("runs the steps that wait at the same time in one pass, conversations first", async () => {
    const { scheduler, passes } = setUp();
    await Promise.all([
      scheduler.run(job("prompt", 10)),
      scheduler.run(job("a", 1)),
      scheduler.run(job("b", 1, { positionStart: 5 })),
    ]);
    expect(passes).toEqual([
      [
        { name: "a", first: 0, tokens: 1, want: "token" },
        { name: "b", first: 0, tokens: 1, want: "token" },
        { name: "prompt", first: 0, tokens: 10, want: "token" },
      ],
    ]);
  });

  test("cuts a long prompt into passes, of which only the last gives a token", async () => {
    const { scheduler, passes } = setUp({ passTokens: 16 });
    expect(await scheduler.run(job("prompt", 40))).toEqual({ kind: "token", id: 40 });
    expect(passes.map(([slice]) => [slice!.first, slice!.tokens, slice!.want])).toEqual([
      [0, 16, "none"],
      [16, 16, "none"],
      [32, 8, "token"],
    ]);
  });

  test("gives every token's hidden states of a prompt in their order, however it was cut", async () => {
    const { scheduler } = setUp({ passTokens: 7 });
    const output = await scheduler.run(job("prompt", 20, { want: "hidden" }));
    expect(output).toEqual({ kind: "hidden", values: Uint16Array.from({ length: 20 }, (_, i) => i) });
  });

  test("lets prompts share passes, so that a short one does not wait for a long one", async () => {
    const { scheduler, passes } = setUp({ passTokens: 16 });
    const done: string[] = [];
    await Promise.all([
      scheduler.run(job("long", 200)).then(() => done.push("long")),
      scheduler.run(job("short", 12)).then(() => done.push("short")),
    ]);
    expect(done).toEqual(["short", "long"]);
    expect(passes.findLastIndex((slices) => slices.some(({ name }) => name === "short"))).toBeLessThan(3);
  });

  test("keeps conversations going while a prompt of 900 tokens is read", async () => {
    // A pass costs 100 ms, and 20 ms more for every token: beside a conversation (120 ms) about nine of the prompt fit.
    const { scheduler, passes } = setUp({ passTokens: 512 }, (tokens) => 100 + 20 * tokens);
    for (let i = 0; i < 3; i++) await scheduler.run(job("talk", 1));
    let isRead = false;
    const prompt = scheduler.run(job("prompt", 900)).then(() => (isRead = true));
    while (!isRead) await scheduler.run(job("talk", 1));
    await prompt;
    const mixed = passes.filter((slices) => slices.some(({ name }) => name === "prompt"));
    const settled = mixed.slice(4, -1); // it learns from the first ones
    expect(mixed.every((slices) => slices.some(({ name }) => name === "talk"))).toBe(true);
    for (const slices of settled) {
      const tokens = slices.reduce((total, slice) => total + slice.tokens, 0);
      expect(100 + 20 * tokens).toBeLessThanOrEqual(3 * 120);
    }
  });

  test("gives a prompt the whole pass once nobody talks any more", async () => {
    const { scheduler, passes, advance } = setUp({ passTokens: 64 }, (tokens) => 10 * tokens);
    await scheduler.run(job("talk", 1));
    await scheduler.run(job("earlier", 16)); // from which it knows what a token takes
    advance(60_000);
    await scheduler.run(job("prompt", 64));
    expect(passes.at(-1)!.map(({ tokens }) => tokens)).toEqual([64]);
  });

  test("drops a step that waits as soon as its caller has gone, and the others' results stay theirs", async () => {
    const held = Promise.withResolvers<void>();
    const { scheduler, passes } = setUp({ run: async (slices) => (await held.promise, slices.map(give)) });
    const first = scheduler.run(job("first", 1));
    await turns();
    const controller = new AbortController();
    const gone = scheduler.run(job("gone", 1, { signal: controller.signal }));
    const other = scheduler.run(job("other", 1, { positionStart: 7 }));
    controller.abort(new Error("left"));
    expect(await caught(gone)).toBe("left");
    expect(scheduler.waiting).toBe(2);
    held.resolve();
    expect(await first).toEqual({ kind: "token", id: 1 });
    expect(await other).toEqual({ kind: "token", id: 8 });
    expect(passes).toEqual([]);
    expect(scheduler.waiting).toBe(0);
  });

  test("lets a step whose caller goes in the middle leave after its pass", async () => {
    const controller = new AbortController();
    const { scheduler, passes } = setUp({ passTokens: 4 });
    const gone = scheduler.run(job("gone", 400, { signal: controller.signal }));
    gone.catch(() => {});
    while (passes.length < 3) await turns(1);
    controller.abort(new Error("left"));
    expect(await caught(gone)).toBe("left");
    expect(passes.length).toBeLessThan(10);
  });

  test("on a slow device is free soon after all callers of long prompts have gone", async () => {
    // 100 ms for a token: 512 of them at once would keep the device for 51 s after the last caller left.
    let longest = 0;
    const { scheduler, passes } = setUp({ passTokens: 512 }, (tokens) => {
      longest = Math.max(longest, 100 * tokens);
      return 100 * tokens;
    });
    const controller = new AbortController();
    const calls = [1, 2, 3, 4].map((i) => scheduler.run(job(`call ${i}`, 1024, { signal: controller.signal })));
    const settled = Promise.allSettled(calls);
    while (passes.length < 3) await turns(1);
    controller.abort(new Error("hung up"));
    const before = passes.length;
    for (const one of await settled) expect(one).toMatchObject({ reason: { message: "hung up" } });
    expect(passes.length).toBeLessThanOrEqual(before + 1);
    expect(longest).toBeLessThanOrEqual(4_000);
    expect(scheduler.waiting).toBe(0);
  });

  test("gives an error to the row that has it, and to all rows where the pass has it", async () => {
    const { scheduler } = setUp({
      run: async (slices) => {
        if (slices.some(({ job }) => nameOf(job) === "fatal")) throw new Error("the device is gone");
        return slices.map((slice) => (nameOf(slice.job) === "bad" ? new Error("its own") : give(slice)));
      },
    });
    const [good, bad] = await Promise.allSettled([scheduler.run(job("good", 1)), scheduler.run(job("bad", 1))]);
    expect(good.status).toBe("fulfilled");
    expect(bad).toMatchObject({ status: "rejected", reason: { message: "its own" } });
    const both = await Promise.allSettled([scheduler.run(job("fatal", 1)), scheduler.run(job("good", 1))]);
    expect(both.map((result) => result.status)).toEqual(["rejected", "rejected"]);
    expect(scheduler.waiting).toBe(0);
    expect(await scheduler.run(job("good", 1))).toEqual({ kind: "token", id: 1 });
  });

  test("ends a step that cannot begin with its reason, and runs the others", async () => {
    const { scheduler } = setUp();
    const broken = {
      ...job("broken", 1),
      begin: () => {
        throw new Error("closed");
      },
    };
    names.set(broken, "broken");
    const [first, second] = await Promise.allSettled([scheduler.run(broken), scheduler.run(job("good", 1))]);
    expect(first).toMatchObject({ status: "rejected", reason: { message: "closed" } });
    expect(second.status).toBe("fulfilled");
  });

  test("lets only rows of one call meet where asked to, all of them", async () => {
    const { scheduler, passes } = setUp({ oneCallPerPass: true });
    const [a, b] = [{}, {}];
    await Promise.all([
      scheduler.run(job("a1", 3, { call: a })),
      scheduler.run(job("b1", 1, { call: b })),
      scheduler.run(job("a2", 5, { call: a })),
    ]);
    expect(passes.map((slices) => slices.map(({ name, tokens }) => `${name} ${tokens}`).toSorted())).toEqual([
      ["a1 3", "a2 5"],
      ["b1 1"],
    ]);
  });

  test("runs every token of 300 random steps exactly once and in order, within the limits of a pass", async () => {
    const random = seededRandom(6);
    const { scheduler, passes } = setUp({ passTokens: 32, maxRows: 5 }, (tokens) => 1 + tokens);
    const steps = Array.from({ length: 300 }, (_, i) => job(`step ${i}`, 1 + Math.floor(random() ** 4 * 120)));
    await Promise.all(
      steps.map(async (step) => {
        await turns(Math.floor(random() * 40));
        expect(await scheduler.run(step)).toEqual({ kind: "token", id: step.tokens });
      }),
    );
    const done = new Map<string, number>();
    for (const slices of passes) {
      expect(slices.length).toBeLessThanOrEqual(5);
      expect(slices.reduce((total, { tokens }) => total + tokens, 0)).toBeLessThanOrEqual(32);
      expect(new Set(slices.map(({ name }) => name)).size).toBe(slices.length);
      for (const { name, first, tokens } of slices) {
        expect(first).toBe(done.get(name) ?? 0);
        done.set(name, first + tokens);
      }
    }
    for (const step of steps) expect(done.get(nameOf(step))).toBe(step.tokens);
  });
});

describe("the pace", () => {
  test("takes few tokens while it knows nothing, and on a fast device does not hold prompts back where nobody talks", () => {
    const pace = new Pace(() => 0);
    expect([pace.promptTokens(0), pace.promptTokens(1)]).toEqual([16, 16]);
    pace.observe(0, 16, 16);
    expect(pace.promptTokens(0)).toBe(4000);
  });

  test("keeps a pass to a few seconds on a slow device, for it cannot be called back", () => {
    const pace = new Pace(() => 0);
    pace.observe(0, 16, 16 * 200);
    expect(pace.promptTokens(0)).toBe(20);
    pace.observe(0, 20, 20 * 60_000);
    expect(pace.promptTokens(0)).toBe(1);
  });

  test("allows as many prompt tokens as make a pass two and a quarter times as long", () => {
    const pace = new Pace(() => 0);
    pace.observe(1, 0, 100);
    pace.observe(0, 100, 1000);
    expect(pace.promptTokens(1)).toBe(12);
  });

  test("fills a pass up to as many rows as the device takes together, and begins no further group", () => {
    const pace = new Pace(() => 0, 4);
    pace.observe(1, 0, 100);
    pace.observe(1, 3, 220);
    expect([0, 1, 2, 3, 4, 5].map((singles) => pace.promptTokens(singles))).toEqual([4, 3, 2, 1, 4, 3]);
    const fast = new Pace(() => 0, 4);
    fast.observe(1, 0, 100);
    fast.observe(0, 100, 1000);
    expect([0, 1, 2, 3, 4].map((singles) => fast.promptTokens(singles))).toEqual([12, 11, 10, 9, 12]);
  });

  test("is still careful a moment after the last word", () => {
    let now = 0;
    const pace = new Pace(() => now);
    pace.observe(1, 0, 100);
    pace.observe(0, 100, 1000);
    now = 1_500;
    expect(pace.promptTokens(0)).toBe(12);
    now = 2_500;
    expect(pace.promptTokens(0)).toBe(400);
  });
});

async function turns(count = 3): Promise<void> {
  for (let i = 0; i < count; i++) await new Promise((resolve) => setImmediate(resolve));
}

const caught = (promise: Promise<unknown>): Promise<string> =>
  promise.then(
    () => "nothing",
    (error: Error) => error.message,
  );
