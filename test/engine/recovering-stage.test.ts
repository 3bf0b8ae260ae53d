import { describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import { silentLogger } from "../../src/base/log.ts";
import { type OpenedStage, RecoveringStage } from "../../src/engine/recovering-stage.ts";
import type { Session, Step, StepOutput } from "../../src/engine/types.ts";

const INFO = { span: { start: 0, end: 1, total: 1 }, hiddenSize: 1, vocabSize: 2, maxContext: 8, eosTokenIds: [] };
const USE = { pageTokens: 1, pages: 8, reservedPages: 0, sessions: 0, prefixHits: 0, prefixTokens: 0 };
const STEP: Step = { input: { kind: "ids", ids: Int32Array.of(1) }, positionStart: 0, want: "none" };

/** A stage whose steps do what a test says, on a device that is lost when a test says so. */
class Opened implements OpenedStage {
  readonly #lost = Promise.withResolvers<string>();
  readonly lost = this.#lost.promise;
  isClosed = false;
  step: () => Promise<StepOutput> = async () => ({ kind: "none" });

  readonly stage = {
    info: INFO,
    cacheUse: USE,
    waiting: 0,
    allocatedBytes: 7,
    open: async () => this.#session(),
    longestPrefix: () => ({ tokens: 3, prefix: "p" }),
    destroy() {},
  };

  lose(): void {
    this.#lost.resolve("it fell over");
  }

  close(): void {
    this.isClosed = true;
  }

  #session(): Session {
    let isClosed = false;
    let length = 0;
    return {
      maxLength: 8,
      get length() {
        return length;
      },
      get isClosed() {
        return isClosed;
      },
      run: async () => {
        if (isClosed) throw new UserError("session_lost", "closed", "", { details: { cache_len: 0 } });
        const output = await this.step();
        length++;
        return output;
      },
      cut: (to) => void (length = to),
      close: () => void (isClosed = true),
    };
  }
}

interface Bench {
  readonly stage: RecoveringStage;
  /** The stages that were opened, the first one included. */
  readonly opened: Opened[];
  /** Milliseconds that were waited before each try. */
  readonly waits: number[];
  readonly gaveUp: Promise<UserError>;
  /** Lets so much time pass. */
  advance(ms: number): void;
}

/** `reopen`: what a try to open it anew meets; by default a device that is back. */
function bench(reopen: () => void | Promise<void> = () => {}): Bench {
  const opened = [new Opened()];
  const waits: number[] = [];
  const gaveUp = Promise.withResolvers<UserError>();
  let now = 0;
  const stage = new RecoveringStage(opened[0]!, {
    name: "GPU",
    log: silentLogger,
    giveUp: gaveUp.resolve,
    reopen: async () => {
      await reopen();
      opened.push(new Opened());
      return opened.at(-1)!;
    },
    clock: {
      now: () => now,
      sleep: async (ms) => {
        waits.push(ms);
        now += ms;
        await Bun.sleep(0);
      },
    },
  });
  return { stage, opened, waits, gaveUp: gaveUp.promise, advance: (ms) => void (now += ms) };
}

const open = (stage: RecoveringStage) => stage.open({ maxLength: 8, stay: "lasting" });
const failure = (work: Promise<unknown>) =>
  work.then(
    () => undefined,
    (error: UserError) => error,
  );
const never = () => new Promise<never>(() => {});
const isBack = async ({ stage, opened }: Bench, times: number) => {
  while (opened.length <= times || stage.outage) await Bun.sleep(0);
};

describe("a stage that outlives its device", () => {
  test("ends a step with device_lost that the driver would never end", async () => {
    const { stage, opened } = bench();
    opened[0]!.step = never;
    const session = await open(stage);
    const step = failure(session.run(STEP));
    opened[0]!.lose();
    expect(await step).toMatchObject({ code: "device_lost", message: "the device GPU is lost: it fell over" });
    expect([opened[0]!.isClosed, session.isClosed, session.length]).toEqual([true, true, 0]);
  });

  test("tells a driver's failure from a loss that it says a moment later, and lets every other one through", async () => {
    const { stage, opened } = bench();
    const session = await open(stage);
    opened[0]!.step = () => Promise.reject(new Error("mapping failed"));
    expect(await failure(session.run(STEP))).toMatchObject({ message: "mapping failed" });
    opened[0]!.step = () => Promise.reject(new UserError("non_finite", "NaN", ""));
    expect(await failure(session.run(STEP))).toMatchObject({ code: "non_finite" });
    opened[0]!.step = async () => {
      opened[0]!.lose();
      throw new Error("mapping failed");
    };
    expect(await failure(session.run(STEP))).toMatchObject({ code: "device_lost" });
  });

  test("takes nothing while it is opened anew, then goes on; sessions of before are lost, and say that they hold nothing", async () => {
    const gate = Promise.withResolvers<void>();
    const one = bench(() => gate.promise);
    const { stage, opened } = one;
    const session = await open(stage);
    await session.run(STEP);
    expect([session.length, stage.allocatedBytes, stage.longestPrefix(Int32Array.of(1)).tokens]).toEqual([1, 7, 3]);
    opened[0]!.lose();
    await Bun.sleep(0);
    expect(stage.outage).toMatchObject({ code: "device_lost" });
    expect(await failure(open(stage))).toMatchObject({ code: "device_lost" });
    expect([stage.allocatedBytes, stage.longestPrefix(Int32Array.of(1)).tokens]).toEqual([0, 0]);
    gate.resolve();
    await isBack(one, 1);
    const lost = await failure(session.run({ ...STEP, positionStart: 1 }));
    expect(lost).toMatchObject({ code: "session_lost", details: { cache_len: 0 } });
    expect(await (await open(stage)).run(STEP)).toEqual({ kind: "none" });
    expect(stage.allocatedBytes).toBe(7);
  });

  test("waits longer after each loss, and gives up at the fifth within a minute", async () => {
    const one = bench();
    for (let loss = 1; loss < 5; loss++) {
      one.opened.at(-1)!.lose();
      await isBack(one, loss);
    }
    expect(one.waits).toEqual([0, 1000, 2000, 4000]);
    one.opened.at(-1)!.lose();
    expect(await one.gaveUp).toMatchObject({
      code: "device_lost",
      message: "the device GPU was lost 5 times within 60 s, the last time: it fell over",
    });
    expect(one.opened).toHaveLength(5);
    expect(one.stage.outage).toBeDefined();
  });

  test("lives with losses that are rare", async () => {
    const one = bench();
    for (let loss = 1; loss <= 12; loss++) {
      one.advance(20_000);
      one.opened.at(-1)!.lose();
      await isBack(one, loss);
    }
    expect(one.waits.slice(2)).toEqual(Array(10).fill(2000)); // always the third within a minute
  });

  test("tries for two minutes to get a device back that is away", async () => {
    const one = bench(() => Promise.reject(new UserError("no_device", "no device is named GPU", "")));
    one.opened[0]!.lose();
    expect((await one.gaveUp).message).toMatch(/GPU was lost and is not back after 1[23]\d s: no device is named GPU/);
    expect(one.waits.slice(0, 7)).toEqual([0, 1000, 2000, 4000, 8000, 15_000, 15_000]);
  });

  test("counts a loss on the way back as one", async () => {
    const one = bench(() => Promise.reject(new UserError("device_lost", "fell over again", "")));
    one.opened[0]!.lose();
    expect((await one.gaveUp).message).toContain("5 times within 60 s, the last time: fell over again");
  });

  test("does not try again what no try can mend", async () => {
    const error = new UserError("bad_model", "model.safetensors has changed", "");
    const one = bench(() => Promise.reject(error));
    one.opened[0]!.lose();
    expect(await one.gaveUp).toBe(error);
    expect(one.waits).toEqual([0]);
  });

  test("that is stopped meanwhile closes what comes back, and is not lost by its own end", async () => {
    const [tried, gate] = [Promise.withResolvers<void>(), Promise.withResolvers<void>()];
    const { stage, opened } = bench(() => (tried.resolve(), gate.promise));
    opened[0]!.lose();
    await tried.promise;
    stage.destroy();
    gate.resolve();
    while (opened.length === 1 || !opened[1]!.isClosed) await Bun.sleep(0);
    expect(opened.map(({ isClosed }) => isClosed)).toEqual([true, true]);

    const quiet = bench();
    quiet.stage.destroy();
    quiet.opened[0]!.lose();
    await Bun.sleep(1);
    expect([quiet.opened[0]!.isClosed, quiet.opened.length, quiet.waits]).toEqual([true, 1, []]);
  });
});
