import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import type { GpuStage } from "../../src/engine/stage.ts";
import type { Session, StepOutput, Want } from "../../src/engine/types.ts";
import type { Device } from "../../src/gpu/device.ts";
import { describeOnDevices } from "../support/device.ts";
import { Oracle, TINY } from "../support/oracle.ts";
import { bits, idsInput, openFixture } from "../support/stages.ts";
import { seededRandom } from "../support/safetensors.ts";

const LAYERS = 4;
const oracle = new Oracle(TINY);
/** Longer than two pages of the cache. */
const PROMPT = oracle.ints("long.input_ids").slice(0, 70);
const OTHER = oracle.ints("middle.input_ids");
/** The ends of the spans of every way to cut the layers. */
const SPLITS = Array.from({ length: 2 ** (LAYERS - 1) }, (_, mask) =>
  [1, 2, 3].filter((cut) => mask & (1 << (cut - 1))).concat(LAYERS),
);

/** A sequence in a chain of stages. */
class Chain {
  constructor(
    readonly stages: readonly GpuStage[],
    readonly sessions: readonly Session[],
  ) {}

  static async open(stages: readonly GpuStage[], maxLength = 128): Promise<Chain> {
    return new Chain(stages, await Promise.all(stages.map((stage) => stage.open({ maxLength, stay: "lasting" }))));
  }

  async step(ids: Int32Array, positionStart: number, want: Want): Promise<StepOutput> {
    let output = await this.sessions[0]!.run({ input: { kind: "ids", ids }, positionStart, want });
    for (const session of this.sessions.slice(1)) {
      if (output.kind !== "hidden") throw new Error(`a stage before the tail gave ${output.kind}`);
      const input = { kind: "hidden", hidden: output.values } as const;
      output = await session.run({ input, positionStart, want, tokenIds: ids });
    }
    return output;
  }

  /** The logits of all tokens, fed in pieces of these sizes. */
  async logits(ids: Int32Array, sizeOf: (piece: number) => number): Promise<Uint16Array> {
    const parts: number[] = [];
    let at = 0;
    for (let piece = 0; at < ids.length; piece++) {
      const end = Math.min(ids.length, at + sizeOf(piece));
      parts.push(...valuesOf(await this.step(ids.slice(at, end), at, "all_logits")));
      at = end;
    }
    return Uint16Array.from(parts);
  }

  close(): void {
    for (const session of this.sessions) session.close();
  }
}

const valuesOf = (output: StepOutput): Uint16Array => {
  if (!("values" in output)) throw new Error(`it gave ${output.kind}`);
  return output.values;
};

const same = (a: Uint16Array, b: Uint16Array): boolean => Buffer.compare(bytes(a), bytes(b)) === 0;
const bytes = (a: Uint16Array): Uint8Array => new Uint8Array(a.buffer, a.byteOffset, a.byteLength);

describeOnDevices("a session", ({ open, name }) => {
  let device: Device;
  let whole: GpuStage;
  let expected: Uint16Array;
  beforeAll(async () => {
    device = await open();
    whole = await openFixture(device, TINY);
    expected = await bits([whole], idsInput(PROMPT), "all_logits");
  }, 60_000);
  afterAll(() => whole.destroy());

  const logitsOf = async (ids: Int32Array) => bits([whole], idsInput(ids), "all_logits");

  describe.each(name === "lavapipe" ? SPLITS : [[LAYERS], [1, 3, LAYERS]])(
    "with the layers cut at %j",
    (...ends: number[]) => {
      test("gives the same bits whether its tokens come at once, one by one or in pieces, and in whatever company", async () => {
        const stages: GpuStage[] = [];
        for (const [index, end] of ends.entries()) {
          stages.push(
            await openFixture(device, TINY, { start: ends[index - 1] ?? 0, end, passTokens: 24, maxSessions: 6 }),
          );
        }
        const feeds: ((piece: number) => number)[] = [() => 70, () => 1, () => 33, (piece) => 1 + ((piece * 7) % 12)];
        const chains = await Promise.all(feeds.map(() => Chain.open(stages)));
        const company = await Chain.open(stages);
        // All at the same time: each pass holds some of everybody's tokens.
        const [other, ...results] = await Promise.all([
          company.logits(OTHER, () => 2),
          ...chains.map((chain, index) => chain.logits(PROMPT, feeds[index]!)),
        ]);
        for (const result of results) expect(same(result!, expected)).toBe(true);
        expect(same(other!, await logitsOf(OTHER))).toBe(true);
        for (const chain of [...chains, company]) chain.close();
        expect(stages.map(({ cacheUse }) => [cacheUse.sessions, cacheUse.reservedPages])).toEqual(
          stages.map(() => [0, 0]),
        );
        for (const stage of stages) stage.destroy();
        await device.reclaim();
      }, 120_000);
    },
  );

  test("that is cut back goes on as if it had never been longer", async () => {
    const chain = await Chain.open([whole]);
    const random = seededRandom(5);
    await chain.logits(PROMPT, () => 70);
    for (const keep of [69, 64, 41, 32, 31, 3, 0]) {
      const next = Int32Array.from({ length: 5 }, () => Math.floor(random() * 200));
      const output = await chain.step(next, keep, "all_logits");
      const fresh = await logitsOf(Int32Array.from([...PROMPT.slice(0, keep), ...next]));
      expect(same(valuesOf(output), fresh.slice(-valuesOf(output).length))).toBe(true);
      await chain.step(PROMPT.slice(keep), keep, "none");
    }
    chain.close();
  }, 120_000);

  test("can begin with the pages of another one, dead or alive, and neither writes into the other's", async () => {
    const prompt = PROMPT.toReversed(); // that no other test has left here
    const first = await Chain.open([whole]);
    await first.step(prompt, 0, "none");
    const expected = await logitsOf(prompt);
    const before = whole.cacheUse;
    const found = whole.longestPrefix(prompt);
    expect(found.tokens).toBe(64);

    const beginWith = async () =>
      new Chain([whole], [await whole.open({ maxLength: 128, prefix: found.prefix, stay: "lasting" })]);
    const second = await beginWith();
    expect(second.sessions[0]!.length).toBe(64);
    const tail = valuesOf(await second.step(prompt.slice(64), 64, "all_logits"));
    expect(same(tail, expected.slice(-tail.length))).toBe(true);

    // The second goes back into a shared page and says something else there; the first reads what it always did.
    await second.step(OTHER.slice(0, 20), 40, "none");
    const again = valuesOf(await first.step(prompt.slice(69), 69, "all_logits"));
    expect(same(again, expected.slice(-again.length))).toBe(true);
    first.close();
    second.close();

    const third = await beginWith();
    const end = valuesOf(await third.step(prompt.slice(64), 64, "all_logits"));
    expect(same(end, expected.slice(-end.length))).toBe(true);
    third.close();
    const { prefixHits, prefixTokens, reservedPages } = whole.cacheUse;
    expect([prefixHits - before.prefixHits, prefixTokens - before.prefixTokens, reservedPages]).toEqual([2, 128, 0]);
    expect(await codeOf(whole.open({ maxLength: 128, prefix: "0".repeat(64), stay: "lasting" }))).toBe("session_lost");
    expect(whole.cacheUse.reservedPages).toBe(0);
  }, 60_000);

  test("draws the same tokens from the same seed alone and in company, at once and after a replay", async () => {
    const sampling = { temperature: 0.9, top_k: 40, seed: 77, repetition_penalty: 1.1 };
    const draw = async (chain: Chain, from: Int32Array, count: number): Promise<number[]> => {
      const ids = [...from];
      let at = 0;
      while (ids.length < from.length + count) {
        const input = { kind: "ids", ids: Int32Array.from(ids.slice(at)) } as const;
        const output = await chain.sessions[0]!.run({ input, positionStart: at, want: "token", sampling });
        if (output.kind !== "token") throw new Error(output.kind);
        at = ids.length;
        ids.push(output.id);
      }
      return ids.slice(from.length);
    };
    const alone = await Chain.open([whole]);
    const drawn = await draw(alone, OTHER, 8);
    expect(new Set(drawn).size).toBeGreaterThan(1);
    alone.close();
    const [a, b] = [await Chain.open([whole]), await Chain.open([whole])];
    const [together] = await Promise.all([draw(a, OTHER, 8), draw(b, PROMPT, 8)]);
    expect(together).toEqual(drawn);
    const replayed = await draw(b, Int32Array.from([...OTHER, ...drawn.slice(0, 5)]), 3);
    expect(replayed).toEqual(drawn.slice(5));
    a.close();
    b.close();
  }, 60_000);

  test("is as it was after a step that could not be run, and closed where a step had written over its tokens", async () => {
    const small = await openFixture(device, TINY, { passTokens: 8, maxSessions: 1 });
    const chain = await Chain.open([small]);
    const [session] = chain.sessions as [Session];
    await chain.step(PROMPT.slice(0, 20), 0, "none");

    expect(await codeOf(chain.step(PROMPT.slice(20), 21, "token"))).toBe("session_lost");
    expect(await codeOf(chain.step(new Int32Array(109), 20, "token"))).toBe("context_exceeded");
    expect(await codeOf(chain.step(Int32Array.of(1_000_000), 20, "token"))).toBe("token_id");
    expect(await codeOf(chain.step(new Int32Array(0), 20, "token"))).toBe("empty_prompt");
    expect(await codeOf(small.open({ maxLength: 257, stay: "lasting" }))).toBe("context_exceeded");

    await abortedAfterAPass(session, PROMPT.slice(20), 20);
    expect([session.length, session.isClosed]).toEqual([20, false]);
    const rest = valuesOf(await chain.step(PROMPT.slice(20), 20, "all_logits"));
    expect(same(rest, expected.slice(-rest.length))).toBe(true);

    await abortedAfterAPass(session, PROMPT.slice(5, 70), 5);
    expect(session.isClosed).toBe(true);
    expect(await codeOf(chain.step(PROMPT.slice(0, 1), 0, "token"))).toBe("session_lost");
    expect(small.cacheUse).toMatchObject({ sessions: 0, reservedPages: 0 });
    small.destroy();
  }, 60_000);

  test("closed while it runs keeps its pages until the pass is over", async () => {
    const chain = await Chain.open([whole]);
    const running = chain.step(PROMPT, 0, "logits");
    while (whole.passMs === 0) await new Promise((resolve) => setImmediate(resolve));
    chain.close();
    expect(whole.cacheUse.reservedPages).toBe(4);
    expect(same(valuesOf(await running), expected.slice(-valuesOf(await running).length))).toBe(true);
    expect(whole.cacheUse).toMatchObject({ sessions: 0, reservedPages: 0 });
  }, 60_000);

  test("has no room where others have reserved it, and calls that pass wait for one another", async () => {
    const small = await openFixture(device, TINY, { maxContext: 64, maxSessions: 2 });
    const first = await small.open({ maxLength: 64, stay: "lasting" });
    const passing = await Promise.all([1, 2, 3].map(() => bits([small], idsInput(PROMPT.slice(0, 60)), "logits")));
    for (const result of passing) expect(same(result, passing[0]!)).toBe(true);
    const second = await small.open({ maxLength: 33, stay: "lasting" });
    expect(await codeOf(small.open({ maxLength: 1, stay: "lasting" }))).toBe("no_room");
    expect(await codeOf(bits([small], idsInput(OTHER), "logits"))).toBe("no_room");
    first.close();
    expect(same(await bits([small], idsInput(PROMPT.slice(0, 60)), "logits"), passing[0]!)).toBe(true);
    second.close();
    small.destroy();
  }, 60_000);

  test("gives 16 clients who come, go on, go back, leave and break off at random what each of them alone would get", async () => {
    const stage = await openFixture(device, TINY, { maxContext: 96, maxSessions: 10, passTokens: 20 });
    const random = seededRandom(17);
    const below = (limit: number) => Math.floor(random() * limit);
    const seen = new Set<string>();
    const client = async () => {
      let session: Session | undefined;
      let ids: number[] = [];
      for (let round = 0; round < (name === "lavapipe" ? 12 : 4); round++) {
        if (!session) {
          const start = PROMPT.slice(0, 33 + below(30));
          const { tokens, prefix } = random() < 0.5 ? stage.longestPrefix(start) : { tokens: 0 };
          const maxLength = 64 + below(32);
          session = await stage.open({ maxLength, prefix, stay: "lasting" }).catch(() => undefined);
          if (!session) {
            seen.add("no room, or the beginning is gone");
            continue;
          }
          ids = Array.from(start.slice(0, tokens));
        }
        const at = ids.length > 0 && random() < 0.4 ? below(ids.length + 1) : ids.length;
        const next = Array.from({ length: Math.min(1 + below(24), session.maxLength - at) }, () => below(250));
        if (next.length === 0 || random() < 0.1) {
          session.close();
          session = undefined;
          seen.add("left");
          continue;
        }
        const leave = random() < 0.15 ? AbortSignal.timeout(below(30)) : undefined;
        const input = { kind: "ids", ids: Int32Array.from(next) } as const;
        const output = await session
          .run({ input, positionStart: at, want: "token", signal: leave })
          .catch((error: Error) => error);
        if (output instanceof Error) {
          seen.add(session.isClosed ? "broken off, and gone" : "broken off");
          expect(output.name).toBe("TimeoutError");
          if (session.isClosed) session = undefined;
          else expect(session.length).toBe(ids.length);
          continue;
        }
        seen.add(at < ids.length ? "went back" : "went on");
        ids = [...ids.slice(0, at), ...next];
        expect(session.length).toBe(ids.length);
        expect(output).toEqual({ kind: "token", id: expect.any(Number) });
        heard.push({ ids, output });
      }
      session?.close();
    };
    const heard: { ids: number[]; output: StepOutput }[] = [];
    await Promise.all(Array.from({ length: 16 }, client));
    expect(stage.cacheUse).toMatchObject({ sessions: 0, reservedPages: 0 });
    for (const { ids, output } of heard) {
      const alone = await stage.forward(idsInput(ids), "token");
      expect(output).toEqual({ kind: "token", id: alone.kind === "token" ? alone.ids[0]! : -1 });
    }
    expect(seen.size).toBeGreaterThanOrEqual(name === "lavapipe" ? 5 : 4);
    stage.destroy();
  }, 240_000);

  test("finds that the device's compiler keeps the order of addition", async () => {
    expect(await whole.warmUp()).toEqual({ keepsOrder: true });
    const middle = await openFixture(device, TINY, { start: 1, end: 2, maxContext: 3 });
    expect(await middle.warmUp()).toEqual({ keepsOrder: true });
    middle.destroy();
  }, 60_000);
});

/** Runs a step, and aborts it when it has been through some passes. */
async function abortedAfterAPass(session: Session, ids: Int32Array, positionStart: number): Promise<void> {
  const controller = new AbortController();
  const running = session.run({
    input: { kind: "ids", ids },
    positionStart,
    want: "token",
    signal: controller.signal,
  });
  await new Promise((resolve) => setImmediate(resolve));
  await new Promise((resolve) => setImmediate(resolve));
  controller.abort(new Error("left"));
  expect(await running.catch((error: Error) => error.message)).toBe("left");
}

const codeOf = (promise: Promise<unknown>): Promise<string> =>
  promise.then(
    () => "nothing",
    (error) => (error instanceof UserError ? error.code : String(error)),
  );
