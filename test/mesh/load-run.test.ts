import { expect, test } from "bun:test";
import { percentiles } from "../../src/mesh/bench-serve.ts";
import type { TextEvent } from "../../src/mesh/head-client.ts";
import { LoadRun } from "../../src/mesh/load-run.ts";

const signal = new AbortController().signal;

/** A text of so many pieces, 5 ms from one to the next. */
async function* text(pieces: number, signal: AbortSignal): AsyncGenerator<TextEvent> {
  for (let i = 0; i < pieces; i++) {
    await Bun.sleep(5);
    signal.throwIfAborted();
    yield { text: "x", finish: i + 1 === pieces ? "stop" : null };
  }
  yield { text: "", finish: null, usage: { prompt: 1, completion: pieces, cached: 0 } };
}

test("texts that end are replaced, and the time between two texts is nobody's gap", async () => {
  let texts = 0;
  const run = new LoadRun(3, (whole) => (texts++, text(4, whole)), signal);
  const begin = performance.now();
  await run.until(() => run.within({ begin, end: Infinity }).length >= 18);
  const end = performance.now();
  await run.stop();
  expect(run.firstMs.every((ms) => ms! >= 4)).toBe(true);
  expect(texts).toBeGreaterThanOrEqual(6); // three gaps each
  const gaps = run.within({ begin, end });
  expect(gaps.length).toBeGreaterThanOrEqual(18);
  for (const gap of gaps) expect(gap.end - gap.begin).toBeGreaterThanOrEqual(4); // what a text waits for at its beginning is no gap
  expect(run.touching({ begin, end })).toEqual(gaps);
  expect(run.touching({ begin: gaps[0]!.begin - 2, end: gaps[0]!.begin - 1 })).toEqual([]);
});

test("a model that ends texts at once is told, not waited for", async () => {
  const run = new LoadRun(1, (whole) => text(0, whole), signal);
  await expect(run.until(() => false)).rejects.toThrow("ended before they began");
});

test("a text that fails ends the wait", async () => {
  const run = new LoadRun(
    2,
    async function* () {
      yield { text: "x", finish: null };
      await Bun.sleep(1);
      throw new Error("the head is gone");
    },
    signal,
  );
  await expect(run.until(() => false)).rejects.toThrow("the head is gone");
});

test("percentiles are values that were measured, by nearest rank", () => {
  const hundred = Array.from({ length: 100 }, (_, i) => 100 - i);
  expect(percentiles(hundred)).toEqual({ count: 100, p50: 50, p99: 99, max: 100 });
  expect(percentiles([7])).toEqual({ count: 1, p50: 7, p99: 7, max: 7 });
});
