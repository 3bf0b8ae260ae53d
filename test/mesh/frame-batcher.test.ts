import { describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import { silentLogger } from "../../src/base/log.ts";
import { Admission } from "../../src/mesh/admission.ts";
import { FrameBatcher, type HopRow } from "../../src/mesh/frame-batcher.ts";
import { NextNode } from "../../src/mesh/next-node.ts";
import { decodeContainer, encodeContainer } from "../../src/protocol/container.ts";

const own = { node: "own", model: "m", end: 2, hiddenSize: 2, vocabSize: 9 };
const info = {
  v: 1,
  node: "next",
  model_id: "m",
  model: "m",
  layers: 4,
  start: 2,
  end: 4,
  hidden_size: 2,
  vocab_size: 9,
};

/** What a frame says of a row. */
interface Said {
  n: number;
  want: string;
  session?: string;
}

interface Frame {
  readonly rows: readonly Said[];
  readonly metadata: Record<string, string>;
  readonly tensors: ReadonlyMap<string, { shape: readonly number[]; data: Uint8Array }>;
  readonly signal: AbortSignal;
}

type Answer = (frame: Frame) => Response | Promise<Response>;

/** By default each row gets the token of its first hidden state. */
const tokens: Answer = ({ rows, tensors }) => {
  const { data } = tensors.get("hidden_states")!;
  const values = new Uint16Array(data.slice().buffer);
  let at = 0;
  const ids = rows.map(({ n, want }) => {
    const id = values[at]!;
    at += n * 2;
    return want === "none" ? null : id;
  });
  if (ids.every((id) => id === null)) return new Response(null, { status: 204 });
  return Response.json({ token_ids: ids, finish: ids.map(() => null) });
};

/** A batcher, an admitted next node that answers as a test wants, and the frames that it got. */
async function batcherTo(answer: Answer, limits: object = {}) {
  const frames: Frame[] = [];
  const fetch = async (url: string, init: RequestInit): Promise<Response> => {
    if (url.endsWith("/info")) return Response.json({ ...info, ...limits });
    if (!url.endsWith("/forward")) return Response.json({});
    const { metadata, tensors } = decodeContainer(init.body as Uint8Array);
    const frame = { rows: JSON.parse(metadata["rows"]!) as Said[], metadata, tensors, signal: init.signal! };
    frames.push(frame);
    const gone = Promise.withResolvers<never>();
    init.signal!.addEventListener("abort", () => gone.reject(new DOMException("gone", "AbortError")));
    return Promise.race([answer(frame), gone.promise]);
  };
  const admission = new Admission({ next: new NextNode({ url: "http://next", own, fetch }), log: silentLogger });
  await admission.start();
  admission.stop();
  return { batcher: new FrameBatcher(admission), frames };
}

const NEVER = new AbortController().signal;

function rowOf(
  first: number,
  options: Partial<HopRow> & { want?: "token" | "none" | "hidden" | "logits"; n?: number } = {},
) {
  const { want = "token", n = 1, ...rest } = options;
  const values = new Uint16Array(n * 2).fill(first);
  return { row: { tokens: n, positionStart: 0, want }, values, requestId: "r", signal: NEVER, ...rest } as HopRow;
}

const idOf = async (sent: ReturnType<FrameBatcher["send"]>) => {
  const { result } = await sent;
  return result.kind === "token" ? result.id : result.kind;
};

describe("rows that are sent in one turn", () => {
  test("go in one frame, and each gets its own reply", async () => {
    const { batcher, frames } = await batcherTo(tokens);
    const sent = [rowOf(3), rowOf(5, { want: "none", n: 2 }), rowOf(7)].map((row) => idOf(batcher.send(row)));
    expect(await Promise.all(sent)).toEqual([3, "none", 7]);
    expect(frames.map(({ rows }) => rows.map(({ n, want }) => [n, want]))).toEqual([
      [
        [1, "token"],
        [2, "none"],
        [1, "token"],
      ],
    ]);
    expect(await idOf(batcher.send(rowOf(8)))).toBe(8);
    expect(frames.length).toBe(2);
  });

  test("go apart where their replies would differ in kind, their routes differ, or one has no token ids", async () => {
    const hidden = () =>
      new Response(
        encodeContainer([{ name: "hidden_states", dtype: "BF16", shape: [1, 2], data: new Uint16Array(2) }]),
        {
          headers: { "Content-Type": "application/x-safetensors" },
        },
      );
    const { batcher, frames } = await batcherTo((frame) =>
      frame.rows[0]!.want === "hidden" ? hidden() : tokens(frame),
    );
    const tokenIds = Int32Array.of(4);
    await Promise.all(
      [
        rowOf(1),
        rowOf(1, { want: "hidden" }),
        rowOf(1, { tokenIds }),
        rowOf(1, { route: [] }),
        rowOf(1, { want: "none" }),
      ].map((row) => batcher.send(row)),
    );
    expect(frames.map(({ rows }) => rows.map(({ want }) => want))).toEqual([
      ["token", "none"],
      ["hidden"],
      ["token"],
      ["token"],
    ]);
    expect(frames[2]!.tensors.get("token_ids")!.data).toEqual(new Uint8Array(tokenIds.buffer));
    expect(frames[3]!.metadata["route"]).toBe("[]");
  });

  test("are cut into frames that the next node takes", async () => {
    const byRows = await batcherTo(tokens, { max_rows: 3 });
    await Promise.all(Array.from({ length: 8 }, (_, i) => byRows.batcher.send(rowOf(i))));
    expect(byRows.frames.map(({ rows }) => rows.length)).toEqual([3, 3, 2]);
    const byBytes = await batcherTo(tokens, { max_body_bytes: 100 });
    await Promise.all(Array.from({ length: 4 }, () => byBytes.batcher.send(rowOf(1, { n: 5 })))); // 40 bytes each
    expect(byBytes.frames.map(({ rows }) => rows.length)).toEqual([2, 2]);
  });

  test("have the longest of their deadlines, and each its own", async () => {
    const { batcher, frames } = await batcherTo(() => new Promise(() => {}));
    const late = new UserError("deadline", "over", "wait longer");
    const short = new AbortController();
    setTimeout(() => short.abort(late), 20);
    const now = performance.now();
    const first = batcher.send(rowOf(1, { deadline: now + 20, signal: short.signal }));
    const second = batcher.send(rowOf(2, { deadline: now + 150 }));
    await expect(first).rejects.toMatchObject({ code: "deadline", details: { hop: "http://next/" } });
    expect(performance.now() - now).toBeLessThan(120);
    await expect(second).rejects.toMatchObject({ code: "deadline" });
    const given = Number(frames[0]!.metadata["deadline_ms"]);
    expect(given).toBeGreaterThan(100);
    expect(given).toBeLessThanOrEqual(150);
  });
});

describe("a row whose caller goes", () => {
  test("before its frame is sent is not in it", async () => {
    const { batcher, frames } = await batcherTo(tokens);
    const gone = new AbortController();
    const leaver = batcher.send(rowOf(1, { signal: gone.signal }));
    const stayer = batcher.send(rowOf(2));
    gone.abort(new Error("gone"));
    await expect(leaver).rejects.toThrow("gone");
    expect(await idOf(stayer)).toBe(2);
    expect(frames.map(({ rows }) => rows.length)).toEqual([1]);
  });

  test("leaves the frame to the others, and the last one takes it along", async () => {
    const { promise, resolve } = Promise.withResolvers<void>();
    const { batcher, frames } = await batcherTo(async (frame) => (await promise, tokens(frame)));
    const first = new AbortController();
    const second = new AbortController();
    const sessions = ["a", "b"].map((session, i) => {
      const row = rowOf(i, { signal: [first, second][i]!.signal });
      return batcher.send({ ...row, row: { ...row.row, session, step: 1 } });
    });
    const outcomes = Promise.allSettled(sessions);
    while (frames.length === 0) await Bun.sleep(1);
    const settled = batcher.settled((session) => session === "a")!;
    expect(batcher.settled((session) => session === "c")).toBeUndefined();
    first.abort(new Error("gone"));
    await Bun.sleep(5);
    expect(frames[0]!.signal.aborted).toBe(false);
    second.abort(new Error("gone too"));
    expect(await outcomes).toMatchObject([{ reason: { message: "gone" } }, { reason: { message: "gone too" } }]);
    expect(frames[0]!.signal.aborted).toBe(true);
    await settled;
    expect(batcher.settled(() => true)).toBeUndefined();
    resolve();
  });
});

describe("what goes wrong", () => {
  const error = { code: "session_lost", message: "m", hint: "h", node: "n", layers: "2-4", cache_len: 3, row: 1 };

  test("with one row is that row's alone", async () => {
    const { batcher } = await batcherTo(() =>
      Response.json({ token_ids: [5, null], finish: [null, null], errors: [null, error] }),
    );
    const [good, bad] = [batcher.send(rowOf(1)), batcher.send(rowOf(1))];
    await expect(bad).rejects.toMatchObject({ status: 409, body: { code: "session_lost", cache_len: 3 } });
    await expect(bad).rejects.not.toMatchObject({ body: { row: 1 } }); // of the frame, which its caller never saw
    expect(await idOf(good)).toBe(5);
  });

  test("with each row is each row's own", async () => {
    const other = { ...error, code: "no_room", row: 0 };
    const { batcher } = await batcherTo(() => Response.json({ error, errors: [error, other] }, { status: 409 }));
    const sent = [batcher.send(rowOf(1)), batcher.send(rowOf(1))];
    expect(await Promise.allSettled(sent)).toMatchObject([
      { reason: { status: 409, body: { code: "session_lost" } } },
      { reason: { status: 429, retryAfter: "1", body: { code: "no_room" } } },
    ]);
  });

  test("with the frame is every row's", async () => {
    const { batcher } = await batcherTo(() =>
      Response.json({ error: { ...error, code: "draining" } }, { status: 503 }),
    );
    const sent = [batcher.send(rowOf(1)), batcher.send(rowOf(1))];
    expect(await Promise.allSettled(sent)).toMatchObject([
      { reason: { status: 503, body: { code: "draining" } } },
      { reason: { status: 503, body: { code: "draining" } } },
    ]);
  });

  test("with the connection, before any reply, is tried once more", async () => {
    let breaks = 1;
    const { batcher, frames } = await batcherTo((frame) => {
      if (breaks-- > 0) throw Object.assign(new Error("reset"), { code: "ECONNRESET" });
      return tokens(frame);
    });
    expect(await Promise.all([idOf(batcher.send(rowOf(1))), idOf(batcher.send(rowOf(2)))])).toEqual([1, 2]);
    expect(frames.map(({ rows }) => rows.length)).toEqual([2, 2]);
    breaks = 2;
    await expect(batcher.send(rowOf(1))).rejects.toMatchObject({ code: "next_unreachable" });
  });
});
