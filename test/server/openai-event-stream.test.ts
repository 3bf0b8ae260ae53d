import { describe, expect, test } from "bun:test";
import { eventStream, type EventStreamOptions } from "../../src/server/openai/event-stream.ts";
import { serve } from "../../src/server/serve.ts";
import { gate, until } from "./tiny-node.ts";

const options = (more: Partial<EventStreamOptions> = {}): EventStreamOptions => ({
  describe: (error) => `{"error":"${(error as Error).message}"}`,
  heartbeatMs: 10_000,
  stallMs: 10_000,
  signal: new AbortController().signal,
  onEnd: () => {},
  ...more,
});

/** Counts the events that were made, and notes how it was left. */
function source(most = Infinity, size = 10) {
  const state = { made: 0, isLeft: false };
  const events = async function* () {
    try {
      while (state.made < most) {
        state.made++;
        yield "x".repeat(size);
      }
    } finally {
      state.isLeft = true;
    }
  };
  return { state, events: events() };
}

describe("a stream of events", () => {
  test("ends with [DONE], and says that it is over", async () => {
    let ends = 0;
    const { events } = source(2, 1);
    const reply = await eventStream(events, options({ onEnd: () => ends++ }));
    expect(await reply.text()).toBe("data: x\n\ndata: x\n\ndata: [DONE]\n\n");
    expect(ends).toBe(1);
  });

  test("makes no event before its reader takes the one before", async () => {
    const { state, events } = source();
    const reader = (await eventStream(events, options())).body!.getReader();
    await Bun.sleep(20);
    expect(state.made).toBe(1);
    await reader.read();
    await reader.read();
    await Bun.sleep(20);
    expect(state.made).toBeLessThanOrEqual(3);
    await reader.cancel();
    expect(state.isLeft).toBe(true);
  });

  test("makes no more over a connection than its reader and the buffers between them take", async () => {
    const { state, events } = source(Infinity, 64 << 10);
    const app = { fetch: () => eventStream(events, options()), drain: async () => {} };
    const server = serve(app, { hostname: "127.0.0.1", port: 0 });
    const socket = await Bun.connect({
      hostname: "127.0.0.1",
      port: server.port,
      socket: {
        open: (connection) => {
          connection.write("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
          connection.pause();
        },
        data: () => {},
      },
    });
    let before = -1;
    await until(async () => {
      const isStill = state.made > 0 && state.made === before;
      before = state.made;
      await Bun.sleep(100);
      return isStill;
    });
    expect(state.made).toBeLessThan(1000); // 64 MiB
    socket.terminate();
    await until(() => state.isLeft);
    await server.stop();
  });

  test("whose reader takes nothing for too long is given up", async () => {
    let isOver = false;
    const { state, events } = source();
    const reply = await eventStream(events, options({ stallMs: 20, onEnd: () => (isOver = true) }));
    const reader = reply.body!.getReader();
    await reader.read();
    await until(() => isOver && state.isLeft);
    await expect(reader.read()).rejects.toThrow("takes nothing");
  });

  test("fails as a whole where its first event does, and says later failures as its last event", async () => {
    let ends = 0;
    const onEnd = () => ends++;
    // oxlint-disable-next-line require-yield
    const early = async function* (): AsyncGenerator<string> {
      throw new Error("early");
    };
    await expect(eventStream(early(), options({ onEnd }))).rejects.toThrow("early");
    const late = async function* () {
      yield "x";
      throw new Error("late");
    };
    const reply = await eventStream(late(), options({ onEnd }));
    expect(await reply.text()).toBe('data: x\n\ndata: {"error":"late"}\n\n');
    expect(ends).toBe(2);
  });

  test("whose reader is gone before it begins is given up", async () => {
    let ends = 0;
    const { state, events } = source();
    const control = new AbortController();
    await eventStream(events, options({ signal: control.signal, onEnd: () => ends++ }));
    control.abort();
    await until(() => state.isLeft);
    expect([state.made, ends]).toEqual([1, 1]);
  });

  test("says that it is alive while nothing comes", async () => {
    const { wait, open } = gate();
    const slow = async function* () {
      await wait();
      yield "x";
    };
    const reply = await eventStream(slow(), options({ heartbeatMs: 10 }));
    const text = reply.text();
    await Bun.sleep(60);
    open();
    expect(await text).toMatch(/^(: [a-z ]+\n\n){2,}data: x\n\ndata: \[DONE\]\n\n$/);
  });
});
