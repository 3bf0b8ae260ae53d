import { describe, expect, test } from "bun:test";
import {
  canHold,
  furthestEnd,
  type Machine,
  type RangeCosts,
  type Share,
  type Split,
  splitLayers,
} from "../../src/weights/split.ts";
import { seededRandom } from "../support/safetensors.ts";

const GIB = 2 ** 30;

/** A model whose layers take what is written, the first and the last something more. */
function model(layers: readonly number[], edges = { head: 0, tailNeed: 0, tailRead: 0 }): RangeCosts {
  const total = layers.length;
  const add = (start: number, end: number) => layers.slice(start, end).reduce((a, b) => a + b, 0);
  return {
    layers: total,
    needBytes: (start, end) => add(start, end) + (start === 0 ? edges.head : 0) + (end === total ? edges.tailNeed : 0),
    ownBytes: (start, end) => add(start, end) + (start === 0 ? edges.head : 0),
    readBytes: (start, end) => add(start, end) + (end === total ? edges.tailRead : 0),
  };
}

const machine = (memoryBytes: number, more: Partial<Machine> = {}): Machine => ({
  memoryBytes,
  bytesPerSecond: 1e11,
  passSeconds: 1e-3,
  hopSeconds: 5e-4,
  ...more,
});

/** The formula, once more: Σ bytes read / speed + passes + hops. */
function secondsOf(costs: RangeCosts, machines: readonly Machine[], shares: readonly Share[]): number {
  return shares.reduce((seconds, { machine: index, start, end }) => {
    const { bytesPerSecond, passSeconds, hopSeconds } = machines[index]!;
    const hop = start === 0 ? 0 : hopSeconds;
    return seconds + costs.readBytes(start, end) / bytesPerSecond + passSeconds + hop;
  }, 0);
}

const holds = (costs: RangeCosts, start: number, end: number, { memoryBytes, limitBytes = Infinity }: Machine) =>
  costs.needBytes(start, end) <= memoryBytes && costs.ownBytes!(start, end) <= limitBytes;

/** Every order of every choice of machines, every place to cut. */
function* everySplit(
  costs: RangeCosts,
  machines: readonly Machine[],
  before: readonly Share[] = [],
): Generator<Share[]> {
  const start = before.at(-1)?.end ?? 0;
  if (start === costs.layers) return yield [...before];
  for (const index of machines.keys()) {
    if (before.some((share) => share.machine === index)) continue;
    for (let end = start + 1; end <= costs.layers; end++) {
      if (!holds(costs, start, end, machines[index]!)) break;
      yield* everySplit(costs, machines, [...before, { machine: index, start, end }]);
    }
  }
}

function check(costs: RangeCosts, machines: readonly Machine[], { shares, secondsPerToken }: Split): void {
  let at = 0;
  for (const { machine: index, start, end } of shares) {
    expect(start).toBe(at);
    expect(end).toBeGreaterThan(start);
    expect(holds(costs, start, end, machines[index]!)).toBe(true);
    at = end;
  }
  expect(at).toBe(costs.layers);
  expect(new Set(shares.map((share) => share.machine)).size).toBe(shares.length);
  expect(secondsPerToken).toBeCloseTo(secondsOf(costs, machines, shares), 12);
}

/** Sizes and speeds of which some are alike, so that splits tie. */
function randomCase(seed: number, mostMachines: number, mostLayers: number) {
  const random = seededRandom(seed);
  const whole = (least: number, most: number) => least + Math.floor(random() * (most - least + 1));
  const layers = Array.from({ length: whole(1, mostLayers) }, () => whole(1, 3) * GIB);
  const costs = model(layers, { head: whole(0, 4) * GIB, tailNeed: whole(0, 4) * GIB, tailRead: whole(0, 2) * GIB });
  const machines = Array.from({ length: whole(1, mostMachines) }, () =>
    machine(whole(1, 16) * GIB, {
      limitBytes: [undefined, undefined, whole(1, 12) * GIB][whole(0, 2)],
      bytesPerSecond: [5e10, 1e11, 9e11][whole(0, 2)],
      hopSeconds: [5e-4, 5e-3, 5e-2][whole(0, 2)],
      passSeconds: [1e-3, 4e-3][whole(0, 1)],
    }),
  );
  return { costs, machines };
}

describe("a split of layers over machines", () => {
  test("gives every layer to one machine, goes beyond no machine's memory, and no other one is faster: 300 small cases", () => {
    const found = { none: 0, left: 0, all: 0 };
    for (let seed = 1; seed <= 300; seed++) {
      const { costs, machines } = randomCase(seed, 4, 7);
      const every = [...everySplit(costs, machines)];
      const fastest = Math.min(...every.map((shares) => secondsOf(costs, machines, shares)));
      const onAll = Math.min(
        ...every.filter(({ length }) => length === machines.length).map((shares) => secondsOf(costs, machines, shares)),
      );
      const splits = splitLayers(costs, machines);
      expect(splits.anyOrder).toBe(true);
      expect(splits.fastest === undefined).toBe(every.length === 0);
      expect(canHold(costs, machines)).toBe(every.length > 0);
      expect(splits.onAll?.secondsPerToken ?? Infinity).toBeCloseTo(onAll, 12);
      if (splits.onAll) check(costs, machines, splits.onAll);
      if (!splits.fastest) {
        found.none++;
        continue;
      }
      check(costs, machines, splits.fastest);
      expect(splits.fastest.secondsPerToken).toBeCloseTo(fastest, 12);
      found[splits.fastest.shares.length < machines.length ? "left" : "all"]++;
    }
    for (const count of Object.values(found)) expect(count).toBeGreaterThan(20); // each kind of end came up
  });

  test("with too many different machines keeps their order, and is the fastest in it: 200 small cases", () => {
    for (let seed = 1; seed <= 200; seed++) {
      const { costs, machines } = randomCase(seed, 5, 7);
      const inOrder = [...everySplit(costs, machines)].filter((shares) =>
        shares.every((share, i) => i === 0 || share.machine > shares[i - 1]!.machine),
      );
      const least = (splits: Share[][]) => Math.min(...splits.map((shares) => secondsOf(costs, machines, shares)));
      const { fastest, onAll, anyOrder } = splitLayers(costs, machines, 0);
      expect(anyOrder).toBe(false);
      expect(fastest?.secondsPerToken ?? Infinity).toBeCloseTo(least(inOrder), 12);
      expect(onAll?.secondsPerToken ?? Infinity).toBeCloseTo(
        least(inOrder.filter(({ length }) => length === machines.length)),
        12,
      );
      for (const split of [fastest, onAll]) if (split) check(costs, machines, split);
    }
  });

  test("of a model of 126 layers over 8 different machines takes seconds, and holds what must hold", () => {
    const costs = model(
      Array.from({ length: 126 }, (_, i) => (i < 3 ? 2 : 6) * GIB),
      {
        head: 4 * GIB,
        tailNeed: 5 * GIB,
        tailRead: 4 * GIB,
      },
    );
    const machines = [80, 96, 100, 128, 144, 160, 188, 192].map((size, i) =>
      machine(size * GIB, { bytesPerSecond: (4 + i) * 1e11, hopSeconds: (1 + i) * 1e-4 }),
    );
    const began = performance.now();
    const { fastest, onAll, anyOrder } = splitLayers(costs, machines);
    expect(performance.now() - began).toBeLessThan(20_000);
    expect(anyOrder).toBe(true);
    check(costs, machines, fastest!);
    check(costs, machines, onAll!);
    expect(fastest!.secondsPerToken).toBeLessThanOrEqual(onAll!.secondsPerToken);
  });
});

describe("what a split is about:", () => {
  test("the faster machine takes as many layers as it holds", () => {
    const costs = model(Array(12).fill(GIB));
    const machines = [machine(8 * GIB), machine(9 * GIB, { bytesPerSecond: 9e11 })];
    expect(splitLayers(costs, machines).fastest!.shares).toContainEqual(expect.objectContaining({ machine: 1 }));
    const [fast] = splitLayers(costs, machines).fastest!.shares.filter((share) => share.machine === 1);
    expect(fast!.end - fast!.start).toBe(9);
  });

  test("machines that are equally fast share by their memory, since nothing else is at stake", () => {
    const { shares } = splitLayers(model(Array(12).fill(GIB)), [machine(8 * GIB), machine(16 * GIB)]).fastest!;
    expect(shares).toHaveLength(1); // one hop less
    const both = splitLayers(model(Array(18).fill(GIB)), [machine(8 * GIB), machine(16 * GIB)]).fastest!.shares;
    expect(Object.fromEntries(both.map(({ machine: index, start, end }) => [index, end - start]))).toEqual({
      0: 6,
      1: 12,
    });
  });

  test("a machine that costs more on the way than it saves is left out, and one that saves more is not", () => {
    const costs = model(Array(12).fill(GIB));
    const slow = machine(16 * GIB, { bytesPerSecond: 1e11 });
    const fast = { bytesPerSecond: 1e12, hopSeconds: 0.01 };
    expect(splitLayers(costs, [slow, machine(6 * GIB, fast)]).fastest!.shares).toHaveLength(2);
    const far = splitLayers(costs, [slow, machine(6 * GIB, { ...fast, hopSeconds: 1 })]);
    // as the head it is reached by nobody, and the way to the other one is short
    expect(far.fastest!.shares.map((share) => share.machine)).toEqual([1, 0]);
    const farBoth = splitLayers(costs, [{ ...slow, hopSeconds: 1 }, machine(6 * GIB, { ...fast, hopSeconds: 1 })]);
    expect(farBoth.fastest!.shares).toEqual([{ machine: 0, start: 0, end: 12 }]);
    expect(farBoth.onAll!.secondsPerToken).toBeGreaterThan(1);
  });

  test("the head's and the tail's extra bytes decide who can be which", () => {
    const costs = model(Array(4).fill(GIB), { head: 0, tailNeed: 6 * GIB, tailRead: GIB });
    const { shares } = splitLayers(costs, [machine(7 * GIB), machine(3 * GIB)]).fastest!;
    expect(shares).toEqual([
      { machine: 1, start: 0, end: 3 },
      { machine: 0, start: 3, end: 4 },
    ]);
  });

  test("how far a machine reaches from a layer is to the byte", () => {
    const costs = model([3, 3, 3], { head: 1, tailNeed: 2, tailRead: 0 });
    expect([0, 3, 4, 6, 7, 11, 12].map((memoryBytes) => furthestEnd(costs, 0, { memoryBytes }))).toEqual([
      0, 0, 1, 1, 2, 2, 3,
    ]);
    expect(canHold(costs, [machine(4), machine(7)])).toBe(false);
    expect(canHold(costs, [machine(4), machine(8)])).toBe(true);
    expect(canHold(costs, [machine(8), machine(4)])).toBe(true);
  });
});
