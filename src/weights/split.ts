/** What a range of a model's layers, `[start, end)`, asks of the machine that holds it. */
export interface RangeCosts {
  readonly layers: number;
  /** Bytes of memory; never fewer for a range that contains another one. */
  needBytes(start: number, end: number): number;
  /** Of these, what a machine's `limitBytes` bounds; never fewer for a range that contains another one. Default: all. */
  ownBytes?(start: number, end: number): number;
  /** Bytes of weights that the pass of one token reads. */
  readBytes(start: number, end: number): number;
}

/** What a machine has for layers. */
export interface Capacity {
  readonly memoryBytes: number;
  /** The most that its share's own bytes may be; absent: all that there is. */
  readonly limitBytes?: number;
}

/** A machine as far as a split is concerned. */
export interface Machine extends Capacity {
  /** At which it reads weights. */
  readonly bytesPerSecond: number;
  /** What every pass takes on it beside that. */
  readonly passSeconds: number;
  /** For one token to come to it from the machine before it, and for the answer to go back. */
  readonly hopSeconds: number;
}

/** The layers of one machine. */
export interface Share {
  /** Which machine: its place in the list. */
  readonly machine: number;
  readonly start: number;
  readonly end: number;
}

export interface Split {
  /** From the model's first layer to its last. */
  readonly shares: readonly Share[];
  readonly secondsPerToken: number;
}

export interface Splits {
  /** The fastest of all that fit, on as many of the machines as that takes; undefined where none fits. */
  readonly fastest: Split | undefined;
  /** The fastest that gives every machine a layer; undefined where there is none. */
  readonly onAll: Split | undefined;
  /** Whether every order of the machines was looked at. Else those of the list: there are too many different machines. */
  readonly anyOrder: boolean;
}

/** Beyond so many steps the machines stay in the order of the list: some seconds. */
const MOST_STEPS = 2e8;
/** Times that differ by less are equal: sums of the same numbers in another order. */
const SAME = 1e-9;

/**
 * Layers over machines so that a token takes the least time:
 * Σ machines (bytes read / bytes per second + pass) + Σ hops. Of splits that are equally fast, the one whose fullest machine
 * holds the least for its size.
 */
export function splitLayers(costs: RangeCosts, machines: readonly Machine[], mostSteps = MOST_STEPS): Splits {
  const kinds = kindsOf(machines);
  const reach = new Map(
    [...Map.groupBy(machines, capacityKey)].map(([key, [machine]]) => [key, reachOf(costs, machine!)]),
  );
  const read = readSums(costs);
  const states = kinds.reduce((product, { members }) => product * (members.length + 1), 1);
  const anyOrder = (states * kinds.length * costs.layers ** 2) / 2 <= mostSteps;
  if (anyOrder) {
    const search = new Search(kinds, anyMoves(kinds), reach, read);
    return { fastest: search.fastest(), onAll: search.lastState(), anyOrder };
  }
  const each = machines.map((machine, index) => ({ machine, members: [index] }));
  return {
    fastest: new Search(each, orderedMoves(each.length, true), reach, read).fastest(),
    onAll: new Search(each, orderedMoves(each.length, false), reach, read).lastState(),
    anyOrder,
  };
}

/** Whether the machines, in some order, hold the whole model. Exact, and far cheaper than finding the fastest split. */
export function canHold(costs: RangeCosts, machines: readonly Capacity[]): boolean {
  const capacities = new Map(machines.map((machine) => [capacityKey(machine), machine]));
  // A machine that starts later reaches no less far, so of a set of machines only the furthest reach matters.
  let reached = new Map([["", { end: 0, left: machines.map(capacityKey).toSorted() }]]);
  for (let used = 0; used < machines.length; used++) {
    const further = new Map<string, { end: number; left: string[] }>();
    for (const { end, left } of reached.values()) {
      for (const one of new Set(left)) {
        const rest = left.toSpliced(left.indexOf(one), 1);
        const next = furthestEnd(costs, end, capacities.get(one)!);
        if (next === costs.layers) return true;
        const key = rest.join();
        if ((further.get(key)?.end ?? -1) < next) further.set(key, { end: next, left: rest });
      }
    }
    reached = further;
  }
  return false;
}

/** The largest end so that `[start, end)` fits; `start` where not even one layer does. */
export function furthestEnd(costs: RangeCosts, start: number, machine: Capacity): number {
  let fits = start;
  let tooFar = costs.layers + 1;
  while (tooFar - fits > 1) {
    const middle = Math.floor((fits + tooFar) / 2);
    if (hasRoom(costs, start, middle, machine)) fits = middle;
    else tooFar = middle;
  }
  return fits;
}

function hasRoom(costs: RangeCosts, start: number, end: number, { memoryBytes, limitBytes }: Capacity): boolean {
  if (costs.needBytes(start, end) > memoryBytes) return false;
  return limitBytes === undefined || (costs.ownBytes?.(start, end) ?? costs.needBytes(start, end)) <= limitBytes;
}

const capacityKey = ({ memoryBytes, limitBytes }: Capacity): string => `${memoryBytes}/${limitBytes ?? ""}`;

/** Machines that are alike in everything: which of them comes first makes no difference. */
interface Kind {
  readonly machine: Machine;
  readonly members: readonly number[];
}

function kindsOf(machines: readonly Machine[]): Kind[] {
  const keyOf = (machine: Machine) =>
    [capacityKey(machine), machine.bytesPerSecond, machine.passSeconds, machine.hopSeconds].join();
  const groups = Map.groupBy(machines.keys(), (index) => keyOf(machines[index]!));
  return [...groups.values()].map((members) => ({ machine: machines[members[0]!]!, members }));
}

/** From each layer: how far a machine of this memory reaches. */
function reachOf(costs: RangeCosts, machine: Capacity): number[] {
  const ends: number[] = [];
  for (let start = 0, end = 0; start < costs.layers; start++) {
    end = Math.max(end, start); // whoever starts one layer later reaches no less far
    while (end < costs.layers && hasRoom(costs, start, end + 1, machine)) end++;
    ends.push(end);
  }
  return ends;
}

/** Bytes read in `[start, end)` as a difference of two numbers. What only the tail reads is in its last layer. */
function readSums({ layers, readBytes }: RangeCosts): Float64Array {
  const sums = new Float64Array(layers + 1);
  for (let layer = 0; layer < layers; layer++) sums[layer + 1] = sums[layer]! + readBytes(layer, layer + 1);
  return sums;
}

/** One more machine, of this kind, behind those in use: the state after it. A state is which machines are in use. */
interface Move {
  readonly kind: number;
  readonly state: number;
}

/** A state is how many of each kind are in use; the last one is all. */
function anyMoves(kinds: readonly Kind[]): Move[][] {
  let moves: Move[][] = [[]];
  for (const [kind, { members }] of kinds.entries()) {
    const step = moves.length;
    moves = Array.from({ length: members.length + 1 }, (_, used) =>
      moves.map((earlier, state) => [
        ...earlier.map((move) => ({ ...move, state: move.state + used * step })),
        ...(used < members.length ? [{ kind, state: state + (used + 1) * step }] : []),
      ]),
    ).flat();
  }
  return moves;
}

/** A state is the last machine in use, counted from 1; those before it may be left out, or not. */
function orderedMoves(machines: number, maySkip: boolean): Move[][] {
  return Array.from({ length: machines + 1 }, (_, last) =>
    Array.from({ length: machines - last }, (_, i) => ({ kind: last + i, state: last + i + 1 })).slice(
      0,
      maySkip ? undefined : 1,
    ),
  );
}

/**
 * For every state and every layer up to which its machines hold the model: the least time, how full the fullest of them is,
 * and the last share. States come in an order in which every move leads forward.
 */
class Search {
  readonly #layers: number;
  readonly #kinds: readonly Kind[];
  readonly #states: number;
  readonly #seconds: Float64Array;
  readonly #fill: Float64Array;
  readonly #lastState: Int32Array;
  readonly #lastStart: Int32Array;
  readonly #lastKind: Int16Array;

  constructor(
    kinds: readonly Kind[],
    moves: readonly (readonly Move[])[],
    reach: ReadonlyMap<string, readonly number[]>,
    readUpTo: Float64Array,
  ) {
    this.#layers = readUpTo.length - 1;
    this.#kinds = kinds;
    this.#states = moves.length;
    const size = moves.length * readUpTo.length;
    this.#seconds = new Float64Array(size).fill(Infinity);
    this.#fill = new Float64Array(size).fill(Infinity);
    this.#lastState = new Int32Array(size);
    this.#lastStart = new Int32Array(size);
    this.#lastKind = new Int16Array(size);
    this.#seconds[0] = this.#fill[0] = 0;
    for (const [state, further] of moves.entries()) {
      for (let start = 0; start < this.#layers; start++) {
        if (this.#seconds[this.#at(state, start)] === Infinity) continue;
        for (const move of further) {
          const { machine } = kinds[move.kind]!;
          this.#extend(state, start, move, reach.get(capacityKey(machine))![start]!, readUpTo);
        }
      }
    }
  }

  fastest(): Split | undefined {
    let best = 0;
    for (let state = 1; state < this.#states; state++) {
      if (this.#isBetter(this.#at(state, this.#layers), this.#at(best, this.#layers))) best = state;
    }
    return this.#splitOf(best);
  }

  lastState(): Split | undefined {
    return this.#splitOf(this.#states - 1);
  }

  #at(state: number, end: number): number {
    return state * (this.#layers + 1) + end;
  }

  #extend(state: number, start: number, move: Move, furthest: number, readUpTo: Float64Array): void {
    const { machine } = this.#kinds[move.kind]!;
    const from = this.#at(state, start);
    const before = this.#seconds[from]! + machine.passSeconds + (start === 0 ? 0 : machine.hopSeconds);
    for (let end = start + 1; end <= furthest; end++) {
      const bytes = readUpTo[end]! - readUpTo[start]!;
      const to = this.#at(move.state, end);
      const seconds = before + bytes / machine.bytesPerSecond;
      const room = Math.min(machine.memoryBytes, machine.limitBytes ?? Infinity);
      const fill = Math.max(this.#fill[from]!, bytes / room);
      if (!isBetter(seconds, fill, this.#seconds[to]!, this.#fill[to]!)) continue;
      this.#seconds[to] = seconds;
      this.#fill[to] = fill;
      this.#lastState[to] = state;
      this.#lastStart[to] = start;
      this.#lastKind[to] = move.kind;
    }
  }

  #isBetter(one: number, other: number): boolean {
    return isBetter(this.#seconds[one]!, this.#fill[one]!, this.#seconds[other]!, this.#fill[other]!);
  }

  #splitOf(state: number): Split | undefined {
    const secondsPerToken = this.#seconds[this.#at(state, this.#layers)]!;
    if (secondsPerToken === Infinity) return undefined;
    const used = this.#kinds.map(() => 0);
    const backwards: { kind: number; start: number; end: number }[] = [];
    for (let end = this.#layers; end > 0;) {
      const at = this.#at(state, end);
      backwards.push({ kind: this.#lastKind[at]!, start: this.#lastStart[at]!, end });
      state = this.#lastState[at]!;
      end = this.#lastStart[at]!;
    }
    const shares = backwards.toReversed().map(({ kind, start, end }) => {
      return { machine: this.#kinds[kind]!.members[used[kind]!++]!, start, end };
    });
    return { shares, secondsPerToken };
  }
}

function isBetter(seconds: number, fill: number, otherSeconds: number, otherFill: number): boolean {
  if (otherSeconds === Infinity) return seconds !== Infinity;
  if (Math.abs(seconds - otherSeconds) > SAME * otherSeconds) return seconds < otherSeconds;
  return fill < otherFill * (1 - SAME);
}
