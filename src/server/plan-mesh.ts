import { ceilDiv } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { StageOptions } from "../models/index.ts";
import { memoryPlan, SOFTWARE_EXTRA_BYTES } from "../weights/memory-plan.ts";
import { planLoad, weightBytesPerToken } from "../weights/plan.ts";
import { canHold, type Capacity, type Machine, type RangeCosts, type Split, splitLayers } from "../weights/split.ts";
import type { MeshMachine } from "./machines.ts";
import {
  ENCODINGS,
  type NodeConfig,
  type NodePlan,
  planNode,
  type Quantization,
  type Surroundings,
} from "./plan-node.ts";
import { textProblem } from "./text-problem.ts";

/** The flags that are the same for every node of the mesh. */
export type MeshConfig = Pick<
  NodeConfig,
  "modelId" | "revision" | "quantization" | "int8Activations" | "maxContext" | "maxSessions" | "offline" | "cacheDir"
>;

/** The answer of `meshnet plan --json`, as docs/plan.md describes it. */
export interface MeshPlan {
  readonly schema: 1;
  readonly model: {
    readonly id: string;
    readonly revision: string;
    readonly type: string;
    readonly layers: number;
    readonly quantization: string;
    readonly maxContext: number;
    readonly maxSessions: number;
  };
  readonly machines: readonly MeshMachine[];
  /** What one token is on the way from a machine to the next. */
  readonly hopBytes: number;
  /** Null where the model fits in no way. */
  readonly split: MeshSplit | null;
  /** With a layer on every machine, where that is another one and possible: it is slower. */
  readonly onAllMachines: MeshSplit | null;
  /** Whether every order of the machines was looked at. */
  readonly anyOrder: boolean;
  /** Of the model in one piece, on a GPU. */
  readonly wholeBytes: number;
  /** Of that, what meshnet itself takes: what a node's `--memory-limit` bounds. */
  readonly wholeOwnBytes: number;
  /** The model in one piece on each machine, in their order: some drivers take more. */
  readonly wholeOnBytes: readonly number[];
  /** How much more the driver may take on a machine that has no GPU and computes on the CPU. */
  readonly softwareExtraBytes: number;
  /** Where nothing fits: each of these is enough. */
  readonly waysOut: readonly WayOut[];
  /** Why no node could be the head of this model, whatever its memory; null where one can. */
  readonly headProblem: { readonly problem: string; readonly hint: string } | null;
}

export interface MeshSplit {
  readonly shares: readonly MeshShare[];
  readonly secondsPerToken: number;
  readonly tokensPerSecond: number;
}

export interface MeshShare {
  /** Its place in `machines`. */
  readonly machine: number;
  readonly start: number;
  readonly end: number;
  /** What must be free there, with what its driver takes. */
  readonly needBytes: number;
  /** Of that, what meshnet itself takes. */
  readonly ownBytes: number;
  readonly readBytes: number;
  readonly readSeconds: number;
  readonly passSeconds: number;
  /** From the machine before it, and back; 0 for the first one. */
  readonly hopSeconds: number;
}

/** Changes that are enough together: flags in place of what was given, and one more machine. */
export interface WayOut {
  readonly quantization?: Quantization;
  readonly maxSessions?: number;
  readonly maxContext?: number;
  /** The memory of one machine more. */
  readonly machineBytes?: number;
}

/** Headers and metadata of the container in which a token's hidden states travel (`protocol/frame.ts`), rounded up. */
const FRAME_BYTES = 1024;
/** Every range of layers is looked at: beyond so many that takes minutes. The deepest models have some hundreds. */
const MOST_LAYERS = 1000;

/**
 * Layers of a model over machines: by exact bytes of each range, and by the predicted time of one token. Fetches headers,
 * no weights.
 */
export async function planMesh(
  config: MeshConfig,
  machines: readonly MeshMachine[],
  surroundings: Surroundings,
): Promise<MeshPlan> {
  const flags = { ...config, shardStart: 0, shardEnd: undefined, host: "", port: 0, device: "auto" };
  const whole = await planNode({ ...flags, allowedHosts: [], allowedOrigins: [] }, surroundings);
  using snapshot = whole.snapshot;
  const { maxContext, maxSessions } = whole.load.options;
  const { layers, hiddenSize } = whole.config;
  if (layers > MOST_LAYERS) {
    const hint = "cut it by hand: meshnet node --dry-run tells what a range of layers takes";
    throw new UserError(
      "not_supported",
      `the model has ${layers} layers, and plan looks at up to ${MOST_LAYERS}`,
      hint,
    );
  }

  const hopBytes = hiddenSize * 2 + FRAME_BYTES;
  const costs = costsOf(whole);
  const extras = machines.map((machine) => driverExtra(machine));
  const parts = machines.map(
    ({ memoryBytes, limitBytes, bytesPerSecond, passSeconds, roundTripSeconds, linkBytesPerSecond }, i): Machine => ({
      memoryBytes: (memoryBytes ?? Infinity) - extras[i]!,
      ...(limitBytes !== null && { limitBytes }),
      bytesPerSecond,
      passSeconds,
      hopSeconds: roundTripSeconds + hopBytes / linkBytesPerSecond,
    }),
  );
  const { fastest, onAll, anyOrder } = splitLayers(costs, parts);
  const unready = await textProblem(snapshot);
  const asMeshSplit = (split: Split) => meshSplit(split, costs, parts, extras);
  return {
    schema: 1,
    model: {
      id: snapshot.modelId,
      revision: snapshot.revision,
      type: whole.config.modelType,
      layers,
      quantization: whole.quantization,
      maxContext,
      maxSessions,
    },
    machines,
    hopBytes,
    split: fastest ? asMeshSplit(fastest) : null,
    onAllMachines: onAll && onAll.shares.length > fastest!.shares.length ? asMeshSplit(onAll) : null,
    anyOrder,
    wholeBytes: costs.needBytes(0, layers),
    wholeOwnBytes: costs.ownBytes(0, layers),
    wholeOnBytes: extras.map((extra) => costs.needBytes(0, layers) + extra),
    softwareExtraBytes: SOFTWARE_EXTRA_BYTES,
    waysOut: fastest ? [] : waysOut(whole, costs, parts),
    headProblem: unready ? { problem: unready.message, hint: unready.hint } : null,
  };
}

type Costs = Required<RangeCosts>;

/** What ranges of the model take, by the plan that a node would make of each. */
function costsOf({ family, config, load, checkpoint }: NodePlan, change: Partial<StageOptions> = {}): Costs {
  const { layers } = config;
  const known = new Map<number, { needBytes: number; ownBytes: number; readBytes: number }>();
  const costs = (start: number, end: number) => {
    const key = start * (layers + 1) + end;
    let range = known.get(key);
    if (!range) {
      const options = { ...load.options, ...change, span: { start, end, total: layers } };
      const plan = planLoad(family, config, options, checkpoint);
      const { neededBytes, peakBytes } = memoryPlan(plan, { isSoftware: false });
      range = { needBytes: neededBytes, ownBytes: peakBytes, readBytes: weightBytesPerToken(plan) };
      known.set(key, range);
    }
    return range;
  };
  return {
    layers,
    needBytes: (start, end) => costs(start, end).needBytes,
    ownBytes: (start, end) => costs(start, end).ownBytes,
    readBytes: (start, end) => costs(start, end).readBytes,
  };
}

/** What the driver of this machine takes more than a GPU's, whatever the layers. */
function driverExtra({ device }: MeshMachine): number {
  return device !== null && /llvmpipe|swiftshader/i.test(device) ? SOFTWARE_EXTRA_BYTES : 0;
}

function meshSplit(
  { shares, secondsPerToken }: Split,
  costs: Costs,
  machines: readonly Machine[],
  extras: readonly number[],
): MeshSplit {
  return {
    secondsPerToken,
    tokensPerSecond: 1 / secondsPerToken,
    shares: shares.map(({ machine, start, end }) => {
      const { bytesPerSecond, passSeconds, hopSeconds } = machines[machine]!;
      const readBytes = costs.readBytes(start, end);
      return {
        machine,
        start,
        end,
        needBytes: costs.needBytes(start, end) + extras[machine]!,
        ownBytes: costs.ownBytes(start, end),
        readBytes,
        readSeconds: readBytes / bytesPerSecond,
        passSeconds,
        hopSeconds: start === 0 ? 0 : hopSeconds,
      };
    }),
  };
}

/** As little as is enough, each tried like the plan itself: one change, else several together, or a machine more. */
function waysOut(whole: NodePlan, costs: RangeCosts, machines: readonly Machine[]): WayOut[] {
  const fits = (way: WayOut) => canHold(costsOf(whole, optionsOf(way)), machines);
  const { maxContext, maxSessions, encoding } = whole.load.options;
  const step = contextStep(maxContext);
  const fewerSessions = (base: WayOut): WayOut[] => {
    const most = largest(maxSessions - 1, (value) => fits({ ...base, maxSessions: value }));
    return most > 0 ? [{ ...base, maxSessions: most }] : [];
  };
  const shorterContext = (base: WayOut): WayOut[] => {
    const most = largest(ceilDiv(maxContext, step) - 1, (steps) => fits({ ...base, maxContext: steps * step }));
    // What is much shorter than was wanted helps nobody.
    return most * step * 8 >= maxContext ? [{ ...base, maxContext: most * step }] : [];
  };

  const isStored = ENCODINGS[whole.quantization as Quantization] !== encoding;
  const smaller = isStored ? [] : SMALLER[whole.quantization as Quantization];
  const mildest = smaller.find((quantization) => fits({ quantization }));
  const ways = [...(mildest ? [{ quantization: mildest }] : []), ...fewerSessions({}), ...shorterContext({})];
  const smallest = smaller.at(-1);
  const bases: WayOut[] = [
    ...(smallest ? [{ quantization: smallest }] : []),
    { maxSessions: 1 },
    ...(smallest ? [{ quantization: smallest, maxSessions: 1 }] : []),
  ];
  for (const base of bases) {
    if (ways.length > 0) break;
    if (base.maxSessions === undefined) ways.push(...fewerSessions(base));
    ways.push(...shorterContext(base));
  }
  const further = smallest && !mildest ? { quantization: smallest } : {};
  const machineBytes = furtherMemory(costs, machines);
  const smallerBytes = further.quantization && furtherMemory(costsOf(whole, optionsOf(further)), machines);
  // Two changes in place of one have to be worth it.
  const isWorthIt = smallerBytes !== undefined && smallerBytes <= machineBytes * WORTH_IT;
  return [...ways, { machineBytes }, ...(isWorthIt ? [{ ...further, machineBytes: smallerBytes }] : [])];
}

const WORTH_IT = 0.9;

function optionsOf({ quantization, maxSessions, maxContext }: WayOut): Partial<StageOptions> {
  return {
    ...(quantization && { encoding: ENCODINGS[quantization], int8Activations: false }),
    ...(maxSessions && { maxSessions }),
    ...(maxContext && { maxContext }),
  };
}

/** The encodings that take less memory, the mildest first. */
const SMALLER: Record<Quantization, readonly Quantization[]> = { bfloat16: ["int8", "nf4"], int8: ["nf4"], nf4: [] };

/** Contexts are told as round numbers: sixty-fourths of what was wanted, or nearly. */
const contextStep = (maxContext: number): number => 2 ** Math.max(0, Math.floor(Math.log2(maxContext)) - 6);

/** The largest value from 1 to `most` that is good, where all below a good one are; 0 where none is. */
function largest(most: number, isGood: (value: number) => boolean): number {
  let good = 0;
  let bad = Math.max(0, most) + 1;
  while (bad - good > 1) {
    const middle = Math.floor((good + bad) / 2);
    if (isGood(middle)) good = middle;
    else bad = middle;
  }
  return good;
}

/** Of one machine more, rounded up to a sixty-fourth of what the whole model takes, or nearly. */
function furtherMemory(costs: RangeCosts, machines: readonly Capacity[]): number {
  const whole = costs.needBytes(0, costs.layers);
  const step = 2 ** Math.max(0, Math.floor(Math.log2(whole)) - 6);
  const steps = ceilDiv(whole, step);
  return (
    step *
    (steps - largest(steps - 1, (fewer) => canHold(costs, [...machines, { memoryBytes: step * (steps - fewer) }])))
  );
}
