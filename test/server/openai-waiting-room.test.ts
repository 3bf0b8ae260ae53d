import { describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import { RemoteError } from "../../src/protocol/error-reply.ts";
import { WaitingRoom } from "../../src/server/openai/waiting-room.ts";
import { until } from "./tiny-node.ts";

const { signal } = new AbortController();
const noRoom = () => new UserError("no_room", "full", "wait");
const remoteNoRoom = () =>
  new RemoteError(429, { code: "no_room", message: "full", hint: "wait", node: "n", layers: "2-4" }, "1");

/** What begins texts where so many have room; `left` is called at the end of one. */
function place(room: number) {
  const state = { free: room, order: [] as number[] };
  const begin = (number: number) => async () => {
    if (state.free === 0) throw noRoom();
    state.free--;
    state.order.push(number);
    return number;
  };
  return { state, begin };
}

describe("a text that finds no room", () => {
  test("begins when one before it ends, in the order in which they came", async () => {
    const room = new WaitingRoom(10);
    const { state, begin } = place(2);
    const entered = [0, 1, 2, 3, 4].map((number) => room.enter(begin(number), signal));
    await until(() => state.order.length === 2);
    for (let ended = 0; ended < 5; ended++) {
      await until(() => state.order.length > ended);
      state.free++;
      room.leave();
    }
    expect(await Promise.all(entered)).toEqual([0, 1, 2, 3, 4]);
    expect(state.order).toEqual([0, 1, 2, 3, 4]);
  });

  test("is refused where no other one runs, and where one failed for another reason the next has its turn", async () => {
    const room = new WaitingRoom(10);
    await expect(room.enter(() => Promise.reject(noRoom()), signal)).rejects.toThrow("full");
    const { state, begin } = place(1);
    await room.enter(begin(0), signal);
    const fails = room.enter(async () => {
      if (state.free === 0) throw noRoom();
      throw new Error("broken");
    }, signal);
    const failure = fails.catch((error: Error) => error.message);
    const waits = room.enter(begin(2), signal);
    await Bun.sleep(5); // both have found no room
    state.free++;
    room.leave();
    expect(await failure).toBe("broken");
    expect(await waits).toBe(2);
  });

  test("on a node that has not heard yet that the last one has ended, tries again", async () => {
    const room = new WaitingRoom(10);
    await room.enter(async () => 0, signal);
    room.leave();
    let tries = 0;
    const begin = async () => {
      if (++tries < 3) throw remoteNoRoom();
      return tries;
    };
    expect(await room.enter(begin, signal)).toBe(3);
  });
});
