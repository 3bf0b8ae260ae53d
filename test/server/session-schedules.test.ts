import { afterAll, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import type { Step } from "../../src/engine/types.ts";
import { seeded } from "../protocol/seeded.ts";
import { call, endSession, type IdsRow, type RowAnswer } from "./session-calls.ts";
import { startChain, until } from "./tiny-node.ts";
import { CONTEXT, tokenAfter } from "./tiny-stage.ts";

const SCHEDULES = Array.from({ length: 64 }, (_, seed) => seed);
const SESSIONS = 16;
const ROUNDS = 12;
const IDLE_MS = 100_000;
/** An id that the tail fails at. */
const POISON = 99;

/** What has happened in any schedule: a test of which nothing comes would pass. */
const seen = new Set<string>();
afterAll(() => {
  const all = ["token", "none", "session_lost", "step_conflict", "context_exceeded", "non_finite", "204", "404"];
  expect([...seen].toSorted()).toEqual(all.toSorted());
});

/** What a client that has kept count knows of its session. */
interface Known {
  /** The tokens that the head holds; undefined: it has no such session. */
  ids: number[] | undefined;
  headUsed: number;
  /** When the nodes after the head last heard of it. */
  beyondUsed: number;
  /** Whether nodes after the head have it; undefined: a call broke off, and nobody can tell. */
  isBeyond: boolean | undefined;
  step: number;
  last: { row: IdsRow; answer: RowAnswer } | undefined;
}

interface Action {
  readonly row: IdsRow;
  /** Looks at the answer, and learns from it. */
  readonly check: (answer: RowAnswer) => void;
}

test.each(SCHEDULES)(
  "whatever clients do with 16 sessions, each answer is what their own history makes it, and all room comes back (schedule %d)",
  async (seed) => {
    const random = seeded(seed);
    const pick = <T>(items: readonly T[]): T => items[random(items.length)]!;
    let now = 0;
    const chain = await startChain(pick([[], [2], [1, 3]]), {
      clock: () => now,
      sessionIdleMs: IDLE_MS,
      gate: () => (random(3) === 0 ? Bun.sleep(random(3)) : undefined),
      refuse: refusePoison,
    });
    const url = chain[0]!.url;
    const hasBeyond = chain.length > 1;
    const sessions: Known[] = Array.from({ length: SESSIONS }, () => ({
      ids: undefined,
      headUsed: 0,
      beyondUsed: 0,
      isBeyond: false,
      step: random(5),
      last: undefined,
    }));

    const freshIds = (most: number) => Array.from({ length: 1 + random(Math.max(1, most)) }, () => random(90));
    const expire = (known: Known) => {
      if (now - known.headUsed >= IDLE_MS) known.ids = known.last = undefined;
      if (now - known.beyondUsed >= IDLE_MS) known.isBeyond = false;
    };

    /** A new step at `at`: what must come of it, and what is known then. */
    const stepAction = (name: string, known: Known, at: number, ids: number[], poisoned: boolean): Action => {
      known.step += 1 + random(2);
      const held = known.ids;
      const sent = poisoned ? [...ids.slice(1), POISON] : ids;
      const want = pick(["token", "token", "none"] as const);
      const row: IdsRow = { session: name, step: known.step, at, ids: sent, want };
      const length = held?.length ?? 0;
      const gone = () => {
        known.ids = known.last = undefined;
        known.isBeyond = undefined; // ended behind the answer
      };
      const check = (answer: RowAnswer) => {
        if (at + sent.length > CONTEXT) return expect(answer).toMatchObject({ code: "context_exceeded" });
        if (at > length) return expect(answer).toMatchObject({ code: "session_lost", cacheLen: length });
        known.headUsed = now;
        // What nodes after the head hold is what the head holds, where they have heard of it lately.
        const isLostBeyond = hasBeyond && at > 0 && known.isBeyond === false;
        if (isLostBeyond && "code" in answer && answer.code === "session_lost") {
          expect(answer.cacheLen).toBe(0);
          if (at < length) gone();
          return;
        }
        if (poisoned) {
          expect(answer).toMatchObject({ code: "non_finite" });
          if (at < length || held === undefined) gone();
          known.beyondUsed = now;
          return;
        }
        const sequence = [...(held ?? []).slice(0, at), ...sent];
        expect(answer).toEqual({ token: want === "none" ? null : tokenAfter(sequence) });
        Object.assign(known, { ids: sequence, beyondUsed: now, isBeyond: hasBeyond, last: { row, answer } });
      };
      return { row, check };
    };

    const actionFor = (name: string, known: Known): Action => {
      const length = known.ids?.length ?? 0;
      const kind = random(20);
      if (kind < 3 && known.last) {
        const { row, answer } = known.last; // a retry
        return {
          row,
          check: (again) => {
            expect(again).toEqual(answer);
            known.headUsed = now;
          },
        };
      }
      if (kind === 3 && known.last) {
        const { row } = known.last; // the same step, and another body or start
        const other = random(2) ? { ...row, ids: [...row.ids, 1] } : { ...row, at: (row.at ?? 0) + 1 };
        const tooLong = (other.at ?? 0) + other.ids.length > CONTEXT;
        return {
          row: other,
          check: (answer) => expect(answer).toMatchObject({ code: tooLong ? "context_exceeded" : "step_conflict" }),
        };
      }
      if (kind === 4 && known.last && known.last.row.step! > 0) {
        const row = { ...known.last.row, step: known.last.row.step! - 1 };
        return { row, check: (answer) => expect(answer).toMatchObject({ code: "step_conflict" }) };
      }
      if (kind === 5 && length < CONTEXT - 6)
        return stepAction(name, known, length + 1 + random(3), freshIds(2), false);
      if (kind === 6) return stepAction(name, known, length, freshIds(CONTEXT), false); // perhaps too long
      const poisoned = kind === 7;
      if (kind < 11 && length > 0) return stepAction(name, known, random(length), freshIds(3), poisoned); // roll back
      if (length > CONTEXT - 5) return stepAction(name, known, 0, freshIds(5), poisoned);
      return stepAction(name, known, length, freshIds(4), poisoned);
    };

    /** A call that its client breaks off: what became of it is found out by sending it again. */
    const cancel = async (name: string, known: Known) => {
      const { row, check } = stepActionOfCancel(name, known);
      const control = new AbortController();
      const broken = call(url, [row], control.signal).catch(() => "gone" as const);
      await Bun.sleep(random(4));
      control.abort();
      const mayReach = hasBeyond && (row.at === 0 || known.isBeyond !== false);
      if (mayReach) Object.assign(known, { isBeyond: undefined, beyondUsed: now });
      await broken;
      const [answer] = await call(url, [row]);
      const wasBack = (row.at ?? 0) < (known.ids?.length ?? 0);
      const isLost = "code" in answer! && answer.code === "session_lost";
      // A step that went back and broke off has left nothing to go back to.
      if (isLost && wasBack) {
        expect(answer).toMatchObject({ cacheLen: 0 });
        known.ids = known.last = undefined;
        return;
      }
      check(answer!);
    };
    const stepActionOfCancel = (name: string, known: Known): Action => {
      const length = known.ids?.length ?? 0;
      const at = random(3) === 0 || length > CONTEXT - 5 ? random(length + 1) : length;
      return stepAction(name, known, at, freshIds(Math.min(4, CONTEXT - at)), false);
    };

    const end = async (name: string, known: Known) => {
      const { status } = await endSession(url, name);
      seen.add(String(status));
      const isCertain = known.ids !== undefined || known.isBeyond !== undefined;
      const isKnown = known.ids !== undefined || known.isBeyond;
      if (isCertain) expect(status).toBe(isKnown ? 204 : 404);
      else expect([204, 404]).toContain(status);
      Object.assign(known, { ids: undefined, last: undefined, isBeyond: false });
    };

    for (let round = 0; round < ROUNDS; round++) {
      if (random(3) === 0) now += pick([IDLE_MS / 4, IDLE_MS / 2, IDLE_MS]);
      sessions.forEach(expire);
      const alone: Promise<void>[] = [];
      const together: Action[] = [];
      sessions.forEach((known, i) => {
        const name = `s-${i}`;
        const kind = random(12);
        if (kind < 2) return; // idle
        if (kind === 2) return void alone.push(end(name, known));
        if (kind === 3) return void alone.push(cancel(name, known));
        const action = actionFor(name, known);
        if (kind === 4) return void alone.push(twice(url, action));
        if (kind < 8) together.push(action);
        else alone.push(call(url, [action.row]).then(([answer]) => action.check(withoutRow(answer!))));
      });
      const rows = together.map(({ row }) => row);
      const frame = rows.length > 0 ? await call(url, rows) : [];
      frame.forEach((answer, i) => together[i]!.check(withoutRow(answer)));
      await Promise.all(alone);
    }

    await Promise.all(sessions.map((known, i) => end(`s-${i}`, known)));
    for (const { stage, app } of chain) {
      await until(() => stage.cacheUse.reservedPages === 0);
      expect([stage.cacheUse.sessions, stage.waiting, app.runner.sessions]).toEqual([0, 0, 0]);
    }
    await Promise.all(chain.map((node) => node.stop()));
  },
  20_000,
);

/** The same call at the same time, as from a client that lost patience: one answer. */
async function twice(url: string, { row, check }: Action): Promise<void> {
  const [[first], [second]] = await Promise.all([call(url, [row]), call(url, [row])]);
  if ("token" in first!) expect(second).toEqual(first);
  // An error leaves nothing to join: the second call may have tried by itself, after the first.
  if ("token" in first! || "token" in second!) return check(first!);
  check(first!);
}

/** Whole frames of errors and single rows spell it differently; what is looked at here is the row itself. */
function withoutRow(answer: RowAnswer): RowAnswer {
  seen.add("code" in answer ? answer.code : answer.token === null ? "none" : "token");
  if (!("code" in answer)) return answer;
  const { row: _, ...rest } = answer;
  return rest;
}

function refusePoison({ tokenIds, input }: Step): void {
  const ids = input.kind === "ids" ? input.ids : tokenIds;
  if (ids?.includes(POISON)) throw new UserError("non_finite", "poison", "send something else");
}
