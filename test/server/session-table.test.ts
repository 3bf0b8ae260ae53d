import { describe, expect, test } from "bun:test";
import type { StepOutput } from "../../src/engine/types.ts";
import { type SessionCall, SessionTable } from "../../src/server/sessions.ts";
import { TinyStage, tokenAfter } from "./tiny-stage.ts";

const NEVER = new AbortController().signal;

function tableOf(options: { keptBytes?: number; stage?: TinyStage } = {}) {
  const stage = options.stage ?? new TinyStage({ start: 0, end: 4 });
  const gone: string[] = [];
  const table = new SessionTable<number>({
    open: (_, session) => stage.open(session),
    maxSessions: 8,
    idleMs: 100,
    clock: () => 0,
    bytesOf: () => 10,
    keptBytes: options.keptBytes ?? 1000,
  });
  /** Runs ids at `positionStart`; `fails`: what comes after this node does. */
  const run = (id: string, step: number, positionStart: number, ids: number[], fails = false): Promise<number> => {
    const call: SessionCall<StepOutput, number> = {
      id,
      step,
      positionStart,
      digest: ids.join(),
      maxLength: 20,
      signal: NEVER,
      local: (session, signal) => {
        const input = { kind: "ids", ids: Int32Array.from(ids) } as const;
        return session.run({ input, positionStart, want: "token", signal });
      },
      rest: async (output) => {
        if (fails || output.kind !== "token") throw new Error("the next node fails");
        return output.id;
      },
      gone: () => gone.push(id),
    };
    return table.run(call);
  };
  return { table, stage, gone, run };
}

describe("a step that this node ran and a later one did not", () => {
  test("is taken back, where it was new", async () => {
    const { table, run } = tableOf();
    await run("s", 1, 0, [1, 2]);
    await expect(run("s", 2, 2, [3], true)).rejects.toThrow("the next node fails");
    expect(table.lengthOf("s")).toBe(2);
    expect(await run("s", 2, 2, [4])).toBe(tokenAfter([1, 2, 4])); // not done, so another body is no conflict
  });

  test("takes the session along, where it went back: what it wrote over is known to nobody", async () => {
    const { table, run, gone, stage } = tableOf();
    await run("s", 1, 0, [1, 2, 3]);
    await expect(run("s", 2, 1, [9, 9], true)).rejects.toThrow("the next node fails");
    expect([table.lengthOf("s"), gone, stage.cacheUse.reservedPages]).toEqual([undefined, ["s"], 0]);
    await expect(run("s", 3, 3, [4])).rejects.toMatchObject({ code: "session_lost", details: { cache_len: 0 } });
  });

  test("leaves no session, where it opened it", async () => {
    const { table, run, gone, stage } = tableOf();
    await expect(run("s", 1, 0, [1, 2, 3], true)).rejects.toThrow("the next node fails");
    expect([table.size, gone, stage.cacheUse.reservedPages]).toEqual([0, ["s"], 0]);
  });
});

test("a reply for which there is no room is made again when its step is, and is the same", async () => {
  const { table, run, stage } = tableOf({ keptBytes: 15 }); // one of 10 bytes
  await run("kept", 1, 0, [1, 2]);
  await run("made again", 1, 0, [3, 4]);
  await run("made again", 2, 2, [5]);
  const { steps } = stage;
  expect(await run("kept", 1, 0, [1, 2])).toBe(tokenAfter([1, 2]));
  expect(stage.steps).toBe(steps);
  expect(await run("made again", 2, 2, [5])).toBe(tokenAfter([3, 4, 5]));
  expect(stage.steps).toBe(steps + 1);
  await expect(run("made again", 2, 2, [6])).rejects.toMatchObject({ code: "step_conflict" });
  table.delete("kept");
  await run("made again", 3, 3, [6]); // its reply has the room now
  const { steps: later } = stage;
  expect(await run("made again", 3, 3, [6])).toBe(tokenAfter([3, 4, 5, 6]));
  expect(stage.steps).toBe(later);
});

test("the id of a batch ends its rows, and no session of another name", async () => {
  const { table, run } = tableOf();
  for (const id of ["chat", "chat.0", "chat.12", "chat-0", "chatter", "chat.x"]) await run(id, 1, 0, [1]);
  expect(table.delete("chat")).toBe(3);
  expect(["chat-0", "chatter", "chat.x"].map((id) => table.has(id))).toEqual([true, true, true]);
  expect(table.delete("chat")).toBe(0);
});
