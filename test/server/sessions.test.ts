import { afterEach, describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import type { Step } from "../../src/engine/types.ts";
import { answersOf, call, containerOf, endSession, type IdsRow } from "./session-calls.ts";
import {
  bytes,
  errorOf,
  gate,
  HIDDEN,
  post,
  postJson,
  startChain,
  startNode,
  type TinyNode,
  type TinyNodeOptions,
  toBits,
  until,
} from "./tiny-node.ts";
import { continued, tokenAfter } from "./tiny-stage.ts";

const running: TinyNode[] = [];
afterEach(async () => {
  await Promise.all(running.splice(0).map((node) => node.stop()));
});
async function chainOf(cuts: readonly number[], options: Partial<TinyNodeOptions> = {}): Promise<TinyNode[]> {
  const nodes = await startChain(cuts, options);
  running.push(...nodes);
  return nodes;
}
async function start(options: TinyNodeOptions): Promise<TinyNode> {
  const node = await startNode(options);
  running.push(node);
  return node;
}

const CONTAINER = "application/x-safetensors";
const send = (node: TinyNode, rows: readonly IdsRow[], signal?: AbortSignal) =>
  fetch(new URL("forward", node.url), {
    method: "POST",
    body: containerOf(rows),
    headers: { "Content-Type": CONTAINER },
    signal,
  });

/** Pages that sessions have taken on these nodes. */
const takenPages = (nodes: readonly TinyNode[]): number[] => nodes.map(({ stage }) => stage.cacheUse.reservedPages);

/** A gate that a test shuts when it likes. */
function door() {
  let shut: ReturnType<typeof gate> | undefined;
  return {
    pass: () => shut?.wait(),
    shut: () => void (shut = gate()),
    open: () => (shut?.open(), (shut = undefined)),
  };
}

describe("a session", () => {
  test.each([[[]], [[2]], [[1, 3]]])(
    "continues token by token as the whole sequence would (cut at %j)",
    async (cuts) => {
      const [head] = await chainOf(cuts);
      const ids = [5, 6, 7];
      const made: number[] = [];
      let next = ids;
      for (let step = 0; step < 10; step++) {
        const at = step === 0 ? 0 : ids.length + step - 1;
        const [answer] = await call(head!.url, [{ session: "chat", step, at, ids: next }]);
        made.push((answer as { token: number }).token);
        next = made.slice(-1);
      }
      expect(made).toEqual(continued(ids, 10));
    },
  );

  test("is spelled in headers too, a batch as id.0, id.1, …, and the reply says what is cached", async () => {
    const [head, tail] = await chainOf([2]);
    const say = (step: number, start: string) => ({
      "X-Meshnet-Session": "batch",
      "X-Meshnet-Step": String(step),
      "X-Meshnet-Pos-Start": start,
    });
    const first = await postJson(head!.url, { input_ids: [[5], [6, 7, 8]] }, say(1, "0"));
    expect(first.headers.get("X-Meshnet-Cache-Len")).toBe("1,3");
    const { token_ids: made } = (await first.json()) as { token_ids: number[] };
    expect(made).toEqual([tokenAfter([5]), tokenAfter([6, 7, 8])]);
    const second = await postJson(head!.url, { input_ids: [[made[0]], [made[1]]] }, say(2, "1,3"));
    expect(second.headers.get("X-Meshnet-Cache-Len")).toBe("2,4");
    expect(await second.json()).toMatchObject({
      token_ids: [continued([5], 2)[1], continued([6, 7, 8], 2)[1]],
    });
    const info = async (node: TinyNode) => (await (await fetch(new URL("info", node.url))).json()) as object;
    expect(await info(tail!)).toMatchObject({ cache: { sessions: 2, reserved_pages: 20 } });
    expect((await endSession(head!.url, "batch")).status).toBe(204);
    expect(await info(tail!)).toMatchObject({ cache: { sessions: 0, reserved_pages: 0 } });
    expect((await endSession(head!.url, "batch")).status).toBe(404);
  });

  test("of hidden states is driven by hand on each node, raw", async () => {
    const [head, tail] = await chainOf([2]);
    const headers = (step: number, at: number) => ({
      "X-Meshnet-Session": "mine",
      "X-Meshnet-Step": String(step),
      "X-Meshnet-Pos-Start": String(at),
    });
    const ids = [3, 4];
    const made: number[] = [];
    for (let step = 0; step < 4; step++) {
      const at = step === 0 ? 0 : ids.length + step - 1;
      const body = { input_ids: [step === 0 ? ids : made.slice(-1)] };
      const hidden = await postJson(head!.url, body, { ...headers(step, at), "X-Meshnet-Route": "local" });
      const shape = { "X-Meshnet-Shape": hidden.headers.get("X-Meshnet-Shape")! };
      const values = await hidden.bytes();
      const reply = await post(tail!.url, values, "application/octet-stream", { ...headers(step, at), ...shape });
      made.push(((await reply.json()) as { token_ids: [number] }).token_ids[0]);
    }
    expect(made).toEqual(continued(ids, 4));
    const gone = await fetch(new URL("sessions/mine", head!.url), {
      method: "DELETE",
      headers: { "X-Meshnet-Route": "local" },
    });
    expect(gone.status).toBe(204);
    expect([head!.stage.cacheUse.sessions, tail!.stage.cacheUse.sessions]).toEqual([0, 1]);
  });

  test("ends at the room that was reserved for it, and stays as it was", async () => {
    const [head] = await chainOf([2]);
    const open = { session: "s", step: 1, ids: [1, 2, 3], maxLen: 4 };
    await call(head!.url, [open]);
    expect(head!.stage.cacheUse.reservedPages).toBe(1);
    const [full] = await call(head!.url, [{ session: "s", step: 2, at: 3, ids: [4, 5] }]);
    expect(full).toMatchObject({ code: "context_exceeded", status: 422 });
    expect(await call(head!.url, [{ session: "s", step: 3, at: 3, ids: [4] }])).toEqual([
      { token: tokenAfter([1, 2, 3, 4]) },
    ]);
  });

  test("samples at the tail, which gets the ids of the tokens along, and logprobs come back", async () => {
    const seen: Step[] = [];
    const tail = await start({ start: 2, end: 4, refuse: (step) => void seen.push(step) });
    const head = await start({ start: 0, end: 2, next: tail.url });
    const sampling = { temperature: 0.8, seed: 7, logprobs: 1, stop_token_ids: [tokenAfter([1, 2], 7)] };
    const reply = await send(head, [{ session: "s", step: 1, ids: [1, 2], sampling }]);
    const token = tokenAfter([1, 2], 7);
    expect(await reply.json()).toMatchObject({
      token_ids: [token],
      finish: ["stop"],
      logprobs: [{ logprob: -0.5, top: [{ id: token }] }],
    });
    expect(seen.at(-1)).toMatchObject({ tokenIds: Int32Array.of(1, 2), sampling });
  });

  test("begins with tokens that an earlier one left, on every node or on none", async () => {
    const [head, tail] = await chainOf([2]);
    const ids = [9, 8, 7, 6, 5, 4, 3];
    await call(head!.url, [{ session: "first", step: 1, ids }]);
    await endSession(head!.url, "first");
    const { tokens, prefix } = head!.app.runner.longestPrefix(Int32Array.from(ids));
    expect(tokens).toBe(4);
    const rest = { at: 4, ids: ids.slice(4), prefix };
    expect(await call(head!.url, [{ session: "second", step: 1, ...rest }])).toEqual([{ token: tokenAfter(ids) }]);
    expect([head!.stage.prefixTokens, tail!.stage.prefixTokens]).toEqual([4, 4]);
    tail!.stage.forgetPrefixes();
    const [lost] = await call(head!.url, [{ session: "third", step: 1, ...rest }]);
    expect(lost).toMatchObject({ code: "session_lost", status: 409, cacheLen: 0 });
    await until(() => head!.stage.cacheUse.sessions === 1 && tail!.stage.cacheUse.sessions === 1);
    expect(await call(head!.url, [{ session: "third", step: 2, at: 0, ids }])).toEqual([{ token: tokenAfter(ids) }]);
    const [short] = await call(head!.url, [{ session: "fourth", step: 1, ...rest, at: 3 }]); // not what the prefix holds
    expect(short).toMatchObject({ code: "session_lost", cacheLen: 0 });
  });

  test("is lost with its node: 409 from that one, and a replay from 0 goes on", async () => {
    const tail = await startNode({ start: 2, end: 4, node: "before" });
    const head = await start({ start: 0, end: 2, next: tail.url });
    await call(head.url, [{ session: "s", step: 1, ids: [1, 2, 3] }]);
    await tail.stop();
    running.push(await startNode({ start: 2, end: 4, node: "after", port: tail.server.port }));
    const [lost] = await call(head.url, [{ session: "s", step: 2, at: 3, ids: [4] }]);
    expect(lost).toMatchObject({ code: "session_lost", status: 409, node: "after", cacheLen: 0 });
    expect(head.stage.cacheUse.sessions).toBe(1); // as it was
    expect(await call(head.url, [{ session: "s", step: 3, at: 0, ids: [1, 2, 3, 4] }])).toEqual([
      { token: tokenAfter([1, 2, 3, 4]) },
    ]);
  });

  test("of a stopped client expires by itself", async () => {
    const [head, tail] = await chainOf([2], { sessionIdleMs: 60 });
    await call(head!.url, [{ session: "s", step: 1, ids: [1, 2, 3] }]);
    expect(tail!.stage.cacheUse.sessions).toBe(1);
    await until(() => head!.stage.cacheUse.reservedPages + tail!.stage.cacheUse.reservedPages === 0);
    const [lost] = await call(head!.url, [{ session: "s", step: 2, at: 3, ids: [4] }]);
    expect(lost).toMatchObject({ code: "session_lost", cacheLen: 0 });
  });

  test("with an id that no client can have is not found", async () => {
    const [head] = await chainOf([]);
    const reply = await endSession(head!.url, encodeURIComponent("../x y"));
    expect([reply.status, (await errorOf(reply)).code]).toEqual([404, "not_found"]);
    const wrong = await fetch(new URL("sessions/a", head!.url), { method: "POST" });
    expect([wrong.status, wrong.headers.get("Allow")]).toEqual([405, "DELETE"]);
  });
});

describe("a retry", () => {
  test("of a step that still runs waits for it, and both get the same; it ran once", async () => {
    const { pass, shut, open } = door();
    const [head, tail] = await chainOf([2], { gate: pass });
    await call(head!.url, [{ session: "s", step: 1, ids: [1] }]);
    const before = [head!, tail!].map(({ stage }) => stage.steps);
    shut();
    const row = { session: "s", step: 2, at: 1, ids: [2] };
    const both = [send(head!, [row]), send(head!, [row])];
    await until(() => head!.stage.calls === 3 || head!.stage.waiting > 0 || head!.app.runner.busyMs > 20);
    open();
    const replies = await Promise.all(both.map(async (reply) => (await reply).text()));
    expect(replies[0]).toContain(`[${tokenAfter([1, 2])}]`);
    expect(replies[1]).toBe(replies[0]!);
    expect([head!, tail!].map(({ stage }) => stage.steps)).toEqual(before.map((steps) => steps + 1));
    expect(await (await send(head!, [row])).text()).toBe(replies[0]!);
  });

  test("outlives the caller it joined: the work goes on while anybody waits for it", async () => {
    const { pass, shut, open } = door();
    const [head, tail] = await chainOf([2], { gate: pass });
    await call(head!.url, [{ session: "s", step: 1, ids: [1] }]);
    const before = tail!.stage.steps;
    shut();
    const row = { session: "s", step: 2, at: 1, ids: [2] };
    const gone = new AbortController();
    const first = send(head!, [row], gone.signal).catch(() => "gone");
    await until(() => head!.app.runner.busyMs > 5);
    const second = send(head!, [row]);
    await Bun.sleep(20);
    gone.abort();
    expect(await first).toBe("gone");
    await Bun.sleep(20);
    open();
    expect(await answersOf(await second, 1)).toEqual([{ token: tokenAfter([1, 2]) }]);
    expect(tail!.stage.steps).toBe(before + 1);
  });

  test("with another body is a conflict, while the step runs and afterwards; so is a step that is over", async () => {
    const { pass, shut, open } = door();
    const [head] = await chainOf([], { gate: pass });
    await call(head!.url, [{ session: "s", step: 5, ids: [1] }]);
    shut();
    const runs = call(head!.url, [{ session: "s", step: 6, at: 1, ids: [2] }]);
    await until(() => head!.app.runner.busyMs > 5);
    const conflict = { code: "step_conflict", status: 409 };
    expect(await call(head!.url, [{ session: "s", step: 6, at: 1, ids: [3] }])).toMatchObject([conflict]);
    expect(await call(head!.url, [{ session: "s", step: 4, at: 1, ids: [2] }])).toMatchObject([conflict]);
    const later = call(head!.url, [{ session: "s", step: 7, at: 2, ids: [3] }]); // waits for its turn
    open();
    expect(await runs).toEqual([{ token: tokenAfter([1, 2]) }]);
    expect(await later).toEqual([{ token: tokenAfter([1, 2, 3]) }]);
    expect(await call(head!.url, [{ session: "s", step: 7, at: 2, ids: [4] }])).toMatchObject([conflict]);
    expect(await call(head!.url, [{ session: "s", step: 7, at: 1, ids: [3] }])).toMatchObject([conflict]);
    expect(await call(head!.url, [{ session: "s", step: 6, at: 1, ids: [2] }])).toMatchObject([conflict]);
    expect(await call(head!.url, [{ session: "s", step: 7, at: 2, ids: [3], want: "none" }])).toMatchObject([conflict]);
  });

  test("after a failure on the next node finds the session as it was", async () => {
    let broken = false;
    const refuse = () => {
      if (broken) throw new UserError("device_lost", "gone", "restart");
    };
    const tail = await start({ start: 2, end: 4, refuse });
    const head = await start({ start: 0, end: 2, next: tail.url });
    await call(head.url, [{ session: "s", step: 1, ids: [1, 2] }]);
    broken = true;
    const row = { session: "s", step: 2, at: 2, ids: [3] };
    expect(await call(head.url, [row])).toMatchObject([{ code: "device_lost", status: 503 }]);
    expect(head.app.runner.lengthOf("s")).toBe(2);
    broken = false;
    expect(await call(head.url, [row])).toEqual([{ token: tokenAfter([1, 2, 3]) }]);
    broken = true;
    // A step that goes back cannot be undone: the session is gone, here and there, and said to be.
    expect(await call(head.url, [{ ...row, step: 3, at: 1 }])).toMatchObject([{ code: "device_lost" }]);
    broken = false;
    expect(await call(head.url, [{ ...row, step: 4, at: 1 }])).toMatchObject([{ code: "session_lost", cacheLen: 0 }]);
    await until(() => tail.stage.cacheUse.sessions === 0);
  });
});

describe("one frame of many rows", () => {
  test("mixes rows that want a token with rows that want none, and sessions with rows of their own", async () => {
    const [head, tail] = await chainOf([2]);
    await call(head!.url, [{ ids: [1] }]); // as good as a probe, which would count below
    const { calls, steps } = tail!.stage;
    const rows: IdsRow[] = [
      { session: "a", step: 1, ids: [1, 2, 3], want: "none" },
      { session: "b", step: 1, ids: [4, 5] },
      { ids: [6, 7, 8] },
    ];
    const reply = await send(head!, rows);
    expect(reply.headers.get("X-Meshnet-Cache-Len")).toBe("3,2,0");
    expect(await reply.json()).toMatchObject({
      token_ids: [null, tokenAfter([4, 5]), tokenAfter([6, 7, 8])],
      finish: [null, null, null],
    });
    expect([tail!.stage.calls, tail!.stage.steps]).toEqual([calls + 1, steps + 3]); // they went on together
    expect(await call(head!.url, [{ session: "a", step: 2, at: 3, ids: [9], want: "none" }])).toEqual([
      { token: null },
    ]);
  });

  test("gives each row its own error, and the others their tokens", async () => {
    const refuse = (step: Step) => {
      if (step.tokenIds?.includes(99)) throw new Error("a bug in one row");
    };
    const tail = await start({ start: 2, end: 4, node: "tail", refuse });
    const head = await start({ start: 0, end: 2, node: "head", next: tail.url });
    await call(head.url, [{ session: "a", step: 5, ids: [1, 2] }]);
    const answers = await call(head.url, [
      { session: "a", step: 4, at: 2, ids: [3] },
      { session: "b", step: 1, at: 7, ids: [3] },
      { session: "c", step: 1, ids: [3, 99] },
      { session: "d", step: 1, ids: [3, 4] },
      { session: "e", step: 1, ids: [500] },
      { session: "f", step: 1, at: 38, ids: [1, 2, 3] },
    ]);
    expect(answers).toMatchObject([
      { code: "step_conflict", row: 0, node: "head" },
      { code: "session_lost", row: 1, cacheLen: 0, node: "head" },
      { code: "internal", row: 2, node: "tail" },
      { token: tokenAfter([3, 4]) },
      { code: "token_id", row: 4, node: "head" },
      { code: "context_exceeded", row: 5, node: "head" },
    ]);
    expect(JSON.stringify(answers)).not.toContain("a bug in one row");
  });

  test("of which every row failed is the first one's error with its status, and each row's own beside it", async () => {
    const [head] = await chainOf([2], { limits: { maxSessions: 1 } });
    await call(head!.url, [{ session: "a", step: 1, ids: [1] }]);
    const reply = await send(head!, [
      { session: "b", step: 1, ids: [3] },
      { session: "a", step: 2, at: 2, ids: [3] },
    ]);
    expect([reply.status, reply.headers.get("Retry-After")]).toEqual([429, "1"]);
    expect(await reply.json()).toMatchObject({
      error: { code: "no_room", row: 0 },
      errors: [
        { code: "no_room", row: 0 },
        { code: "session_lost", row: 1, cache_len: 1 },
      ],
    });
  });

  test("holds the values of the rows that went well, and in its metadata why the others did not", async () => {
    const [head, tail] = await chainOf([2]);
    const one = { step: 1, n: 2, want: "hidden" };
    const rows = [
      { session: "b", ...one, pos_start: 7 },
      { session: "c", ...one },
    ];
    const body = containerOf([{ ids: [3, 4] }, { ids: [3, 4] }], { rows: JSON.stringify(rows) });
    const reply = await post(head!.url, body, CONTAINER);
    const header = new TextDecoder().decode((await reply.bytes()).subarray(8, 400));
    expect(header).toContain(`"shape":[2,${HIDDEN}]`);
    expect(header).toContain("session_lost");
    expect(header).toContain("null]");
    // A raw reply has no place for one row's error beside another's values: the call fails, and can be sent again.
    const values = bytes(toBits(Array(2 * HIDDEN).fill(1)));
    const raw = await post(tail!.url, values, "application/octet-stream", {
      "X-Meshnet-Shape": `2,1,${HIDDEN}`,
      "X-Meshnet-Session": "raw",
      "X-Meshnet-Step": "1",
      "X-Meshnet-Pos-Start": "0,9",
      "X-Meshnet-Want": "hidden",
    });
    expect([raw.status, (await errorOf(raw)) as object]).toEqual([
      409,
      expect.objectContaining({ code: "session_lost", row: 1 }),
    ]);
  });
});

describe("a node that is gone", () => {
  /** As nodes do by themselves every other second. */
  const askNext = (...nodes: TinyNode[]) => Promise.all(nodes.map((node) => node.admission!.next.info()));

  test("leaves no session behind on those that it passed rows on to, nor on those after them", async () => {
    let now = 1e6;
    const [head, ...rest] = await chainOf([1, 3], { clock: () => now });
    await call(head!.url, [{ session: "s", step: 1, ids: [1, 2] }]);
    expect(takenPages(rest).every((pages) => pages > 0)).toBe(true);
    const before = takenPages(rest);

    // As long as it lives it asks how its next node is, and nothing ends.
    now += 59_000;
    await askNext(head!, rest[0]!);
    now += 59_000;
    for (const node of rest) node.app.runner.expire();
    await call(head!.url, [{ session: "s", step: 2, at: 2, ids: [3] }]);
    expect(takenPages(rest)).toEqual(before);

    await head!.stop();
    now += 59_000;
    await askNext(rest[0]!); // which lives on
    for (const node of rest) node.app.runner.expire();
    expect(takenPages(rest)).toEqual(before);
    now += 2_000;
    rest[0]!.app.runner.expire();
    await until(() => takenPages(rest).every((pages) => pages === 0));
  });

  test("does not end what others opened", async () => {
    let now = 1e6;
    const clock = () => now;
    const tail = await start({ start: 2, end: 4, clock });
    const [one, other] = await Promise.all([1, 2].map(() => start({ start: 0, end: 2, next: tail.url, clock })));
    await call(one!.url, [{ session: "one", step: 1, ids: [1] }]);
    await call(other!.url, [{ session: "other", step: 1, ids: [1] }]);
    await one!.stop();
    now += 61_000;
    await askNext(other!);
    tail.app.runner.expire();
    expect(tail.app.runner.lengthOf("one")).toBe(0);
    expect(await call(other!.url, [{ session: "other", step: 2, at: 1, ids: [2] }])).toEqual([
      { token: tokenAfter([1, 2]) },
    ]);
  });
});

describe("a client that goes away", () => {
  test("before its session is open leaves nothing behind, on any node", async () => {
    for (const shutOne of [0, 1]) {
      const doors = [door(), door()];
      const tail = await start({ start: 2, end: 4, gate: doors[1]!.pass });
      const head = await start({ start: 0, end: 2, next: tail.url, gate: doors[0]!.pass });
      doors[shutOne]!.shut();
      const gone = new AbortController();
      const broken = send(head, [{ session: "s", step: 1, ids: [1, 2] }], gone.signal).catch(() => "gone");
      await until(() => [head, tail][shutOne]!.app.runner.busyMs > 5);
      gone.abort();
      expect(await broken).toBe("gone");
      await Bun.sleep(20);
      doors[shutOne]!.open();
      await until(() => head.stage.cacheUse.reservedPages + tail.stage.cacheUse.reservedPages === 0);
      expect(await call(head.url, [{ session: "s", step: 1, ids: [7] }])).toEqual([{ token: tokenAfter([7]) }]);
    }
  });

  test("in the middle of a step can go on where it was", async () => {
    const tailDoor = door();
    const tail = await start({ start: 2, end: 4, gate: tailDoor.pass });
    const head = await start({ start: 0, end: 2, next: tail.url });
    await call(head.url, [{ session: "s", step: 1, ids: [1, 2] }]);
    tailDoor.shut();
    const gone = new AbortController();
    const broken = send(head, [{ session: "s", step: 2, at: 2, ids: [3] }], gone.signal).catch(() => "gone");
    await until(() => tail.app.runner.busyMs > 5);
    gone.abort();
    await broken;
    await until(() => head.app.runner.lengthOf("s") === 2);
    tailDoor.open();
    expect(await call(head.url, [{ session: "s", step: 3, at: 2, ids: [4] }])).toEqual([
      { token: tokenAfter([1, 2, 4]) },
    ]);
  });

  test("takes its own row out of a frame, and the rows of others stay in it", async () => {
    const tailDoor = door();
    const headDoor = door();
    const tail = await start({ start: 2, end: 4, gate: tailDoor.pass });
    const head = await start({ start: 0, end: 2, next: tail.url, gate: headDoor.pass });
    await call(head.url, [{ ids: [1] }]);
    headDoor.shut();
    tailDoor.shut();
    const blocker = call(head.url, [{ ids: [1], want: "none" }]);
    await until(() => head.app.runner.busyMs > 5);
    const gone = new AbortController();
    const leaver = send(head, [{ session: "leaver", step: 1, ids: [5] }], gone.signal).catch(() => "gone");
    const stayer = call(head.url, [{ session: "stayer", step: 1, ids: [6] }]);
    await until(() => head.stage.waiting === 2);
    headDoor.open();
    await until(() => tail.app.runner.busyMs > 5 && tail.app.runner.sessions === 2);
    gone.abort();
    expect(await leaver).toBe("gone");
    await Bun.sleep(20);
    tailDoor.open();
    expect(await stayer).toEqual([{ token: tokenAfter([6]) }]);
    await blocker;
    await until(() => tail.app.runner.sessions === 1 && head.app.runner.sessions === 1); // the leaver's is ended
  });

  test("DELETE ends a session under a step that runs, here and on the next node, at once", async () => {
    const tailDoor = door();
    const tail = await start({ start: 2, end: 4, gate: tailDoor.pass });
    const head = await start({ start: 0, end: 2, next: tail.url });
    await call(head.url, [{ session: "s", step: 1, ids: [1, 2] }]);
    tailDoor.shut();
    const step = call(head.url, [{ session: "s", step: 2, at: 2, ids: [3] }]);
    await until(() => tail.app.runner.busyMs > 5);
    const began = performance.now();
    expect((await endSession(head.url, "s")).status).toBe(204);
    expect(await step).toMatchObject([{ code: "session_lost", status: 409, cacheLen: 0 }]);
    expect([head.app.runner.sessions, tail.app.runner.sessions]).toEqual([0, 0]);
    expect(performance.now() - began).toBeLessThan(1000);
    tailDoor.open();
    await until(() => head.stage.cacheUse.reservedPages + tail.stage.cacheUse.reservedPages === 0);
  });
});

describe("room", () => {
  test("for one session more than there may be is refused with 429 and when to come back", async () => {
    const node = await start({ start: 0, end: 4, limits: { maxSessions: 2 } });
    const open = (session: string) => send(node, [{ session, step: 1, ids: [1] }]);
    expect([(await open("a")).status, (await open("b")).status]).toEqual([200, 200]);
    const third = await open("c");
    expect([third.status, third.headers.get("Retry-After")]).toEqual([429, "1"]);
    expect(await errorOf(third)).toMatchObject({ code: "no_room", message: expect.stringMatching(/2 sessions.*2/) });
    await endSession(node.url, "a");
    expect((await open("c")).status).toBe(200);
  });

  test("in pages that is taken is refused, and a call that stays for a moment waits for one that passes", async () => {
    const { pass, shut, open } = door();
    const node = await start({ start: 0, end: 4, pages: 12, gate: pass });
    expect((await send(node, [{ session: "a", step: 1, ids: [1] }])).status).toBe(200); // 10 pages of 4
    const more = await send(node, [{ session: "b", step: 1, ids: [1] }]);
    expect([more.status, (await errorOf(more)).code]).toEqual([429, "no_room"]);
    expect((await send(node, [{ session: "b", step: 1, ids: [1], maxLen: 4 }])).status).toBe(200);
    shut();
    const two = [call(node.url, [{ ids: [1, 2] }]), call(node.url, [{ ids: [1, 3] }])]; // room for one at a time
    await until(() => node.app.runner.busyMs > 5);
    open();
    expect(await Promise.all(two)).toEqual([[{ token: tokenAfter([1, 2]) }], [{ token: tokenAfter([1, 3]) }]]);
    const hopeless = await send(node, [{ ids: Array(9).fill(1) }]);
    expect([hopeless.status, (await errorOf(hopeless)).code]).toEqual([429, "no_room"]);
    expect((await fetch(new URL("health/ready", node.url))).status).toBe(200);
  });

  test("in the queue is for new work: sessions that are open go on", async () => {
    const { pass, shut, open } = door();
    const node = await start({ start: 0, end: 4, gate: pass, limits: { maxWaiting: 1 } });
    await call(node.url, [{ session: "s", step: 1, ids: [1] }]);
    shut();
    const taken = [call(node.url, [{ ids: [1] }]), call(node.url, [{ ids: [1] }])];
    await until(
      async () => (await send(node, [{ session: "new", step: 1, ids: [1] }], AbortSignal.timeout(20))).status === 429,
    );
    const goes = call(node.url, [{ session: "s", step: 2, at: 1, ids: [2] }]);
    await Bun.sleep(20);
    open();
    expect(await goes).toEqual([{ token: tokenAfter([1, 2]) }]);
    await Promise.all(taken);
  });

  test("a body that could not be used is refused before it comes", async () => {
    const { pass, shut, open } = door();
    const node = await start({ start: 0, end: 4, gate: pass, limits: { maxWaiting: 0 } });
    shut();
    const taken = call(node.url, [{ ids: [1] }]);
    await until(() => node.app.runner.busyMs > 0);
    const body = new ReadableStream<Uint8Array>({ pull: () => new Promise<void>(() => {}) });
    const headers = { "Content-Length": String(2 << 20), "Content-Type": CONTAINER, Host: "127.0.0.1" };
    const request = new Request(`${node.url}forward`, { method: "POST", headers, body });
    const reply = await node.app.fetch(request);
    expect([reply.status, (await errorOf(reply)).code]).toEqual([429, "no_room"]);
    open();
    await taken;
  });
});

test("a full node refuses the new rows of a frame, and not those that go on", async () => {
  const { pass, shut, open } = door();
  const node = await start({ start: 0, end: 4, gate: pass, limits: { maxWaiting: 0 } });
  await call(node.url, [{ session: "s", step: 1, ids: [1] }]);
  shut();
  const taken = call(node.url, [{ ids: [1] }]);
  await until(() => node.app.runner.busyMs > 0);
  const frame = call(node.url, [
    { session: "new", step: 1, ids: [5] },
    { session: "s", step: 2, at: 1, ids: [2] },
  ]);
  await Bun.sleep(20);
  open();
  expect(await frame).toMatchObject([{ code: "no_room", row: 0 }, { token: tokenAfter([1, 2]) }]);
  await taken;
});

test("a reply that breaks off on its way is asked for again where the rows are sessions', and the step ran once", async () => {
  const tail = await start({ start: 2, end: 4 });
  let breaks = 0;
  const proxy = Bun.listen<{ up?: Bun.Socket<{ down: Bun.Socket<unknown>; cut: boolean }> }>({
    hostname: "127.0.0.1",
    port: 0,
    socket: {
      open: (socket) => void (socket.data = {}),
      async data(socket, data) {
        const cut = String(data).startsWith("POST /forward") && breaks > 0 && breaks-- > 0;
        socket.data.up ??= await Bun.connect({
          hostname: "127.0.0.1",
          port: tail.server.port,
          data: { down: socket as Bun.Socket<unknown>, cut: false },
          socket: {
            data(up, reply) {
              up.data.down.write(up.data.cut ? reply.subarray(0, -3) : reply);
              if (up.data.cut) setTimeout(() => up.data.down.terminate(), 5);
            },
            close: (up) => void up.data.down.end(),
          },
        });
        if (cut) socket.data.up.data.cut = true;
        socket.data.up.write(data);
      },
      close: (socket) => void socket.data.up?.end(),
    },
  });
  running.push({ stop: async () => proxy.stop(true) } as TinyNode);
  const head = await start({ start: 0, end: 2, next: `http://127.0.0.1:${proxy.port}/` });
  await call(head.url, [{ session: "s", step: 1, ids: [1] }]);
  const { steps } = tail.stage;
  breaks = 1;
  expect(await call(head.url, [{ session: "s", step: 2, at: 1, ids: [2] }])).toEqual([{ token: tokenAfter([1, 2]) }]);
  expect([breaks, tail.stage.steps]).toEqual([0, steps + 1]);
  breaks = 1;
  expect(await call(head.url, [{ ids: [1] }])).toMatchObject([{ code: "next_unreachable", status: 502 }]);
});
