import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import type { AdapterSummary } from "../gpu/adapter.ts";
import type { Device } from "../gpu/device.ts";
import { type DeviceMemory, deviceMemory } from "../gpu/memory.ts";
import type { StageOptions } from "../models/index.ts";
import { type MemoryPlan, memoryPlan, memoryTable } from "../weights/memory-plan.ts";
import { type LoadPlan, planLoad } from "../weights/plan.ts";
import type { NodePlan } from "./plan-node.ts";

/** The place that a plan must fit into. */
export interface Room {
  readonly adapter: Pick<AdapterSummary, "name" | "isSoftware">;
  readonly memory: DeviceMemory;
  /** `--memory-limit`: the most that meshnet itself may have on the device. */
  readonly limitBytes?: number;
  /** The largest buffer that a kernel can bind whole. Weights are split by rows, all else is not. */
  readonly maxBindingBytes: number;
}

type Encoding = StageOptions["encoding"];

/** The same model on the same node with other options: how a change is tried. */
export type Replan = (change: Partial<StageOptions>) => LoadPlan;

/** What other plans for the same model are made from. */
export type Replannable = Pick<NodePlan, "family" | "config" | "checkpoint" | "load">;

/** The same model from the same headers: ranges within the span of the plan, and any other option. */
export const replanOf =
  ({ family, config, checkpoint, load }: Replannable): Replan =>
  (change) =>
    planLoad(family, config, { ...load.options, ...change }, checkpoint);

/** What a node's plan must fit into, on a device that is open. */
export const roomOf = (device: Device, limitBytes?: number): Room => ({
  adapter: device.info,
  memory: deviceMemory(device.info),
  limitBytes,
  maxBindingBytes: device.maxBindingBytes,
});

/** The question that a node asks before it loads. */
export const fitQuestion = (plan: Replannable, room: Room): FitQuestion => ({
  load: plan.load,
  replan: replanOf(plan),
  room,
  mayQuantize: !plan.load.options.int8Activations && plan.load.weights.every(({ stored }) => !stored),
});

/** What the plan takes of a device, whichever that will be: a line for each purpose, and the sum. */
export function describeMemory(load: LoadPlan): string[] {
  const { rows, plannedBytes, peakBytes } = memoryPlan(load);
  return [
    ...memoryTable(rows),
    `${formatBytes(plannedBytes)} of the device for good, ${formatBytes(peakBytes)} while it loads, beside what the driver takes`,
  ];
}

/** What is too small, and for what. */
export type Shortage =
  | { readonly of: "memory" | "limit"; readonly neededBytes: number; readonly thereBytes: number }
  | { readonly of: "binding"; readonly neededBytes: number; readonly thereBytes: number; readonly label: string };

/** Why the plan does not fit; undefined where it does, or where nothing is known of the device's memory. */
export function shortageOf(plan: MemoryPlan, { memory, limitBytes, maxBindingBytes }: Room): Shortage | undefined {
  const { label, bytes } = plan.largestBuffer;
  if (bytes > maxBindingBytes) return { of: "binding", neededBytes: bytes, thereBytes: maxBindingBytes, label };
  if (limitBytes !== undefined && plan.peakBytes > limitBytes)
    return { of: "limit", neededBytes: plan.peakBytes, thereBytes: limitBytes };
  if (memory.availableBytes !== null && plan.neededBytes > memory.availableBytes)
    return { of: "memory", neededBytes: plan.neededBytes, thereBytes: memory.availableBytes };
  return undefined;
}

export const fits = (load: LoadPlan, room: Room): boolean =>
  shortageOf(memoryPlan(load, room.adapter), room) === undefined;

/** The largest end so that layers [start, end) fit, or undefined where not even one does. `most`: where to stop. */
export const largestEnd = (replan: Replan, { start, end: most, total }: StageOptions["span"], room: Room) =>
  largest(start + 1, most, (end) => fits(replan({ span: { start, end, total } }), room));

/** The largest of least to most that is good, where all below a good one are good too. */
function largest(least: number, most: number, isGood: (value: number) => boolean): number | undefined {
  if (most < least || !isGood(least)) return undefined;
  let good = least;
  let bad = most + 1;
  while (bad - good > 1) {
    const middle = Math.floor((good + bad) / 2);
    if (isGood(middle)) good = middle;
    else bad = middle;
  }
  return good;
}

/** A change after which the node starts: the planner has tried it. */
export interface Suggestion {
  /** To be given in place of what was given: ["--shard-end", "8"]. */
  readonly flags: readonly string[];
  readonly change: Partial<StageOptions>;
  /** With the change: of what was short. */
  readonly neededBytes: number;
}

export interface FitQuestion {
  readonly load: LoadPlan;
  readonly replan: Replan;
  readonly room: Room;
  /** Whether `--quantization` may be another: not where the checkpoint is quantized, or INT8 activations need it. */
  readonly mayQuantize: boolean;
}

/** The plan in bytes. @throws UserError `does_not_fit` with a table, what there is, and up to three changes that would fit. */
export function checkFit(question: FitQuestion): MemoryPlan {
  const plan = memoryPlan(question.load, question.room.adapter);
  const shortage = shortageOf(plan, question.room);
  if (shortage) throw refusal(question, plan, shortage);
  return plan;
}

/** The driver has refused memory that seemed to be there: it gave so much of the plan. */
export function refusedByDriver(question: FitQuestion, grantedBytes: number, message: string): UserError {
  const limitBytes = Math.min(grantedBytes, question.room.limitBytes ?? grantedBytes);
  const room = { ...question.room, limitBytes };
  const plan = memoryPlan(question.load, room.adapter);
  const shortage = { of: "memory", neededBytes: plan.peakBytes, thereBytes: grantedBytes } as const;
  return refusal({ ...question, room }, plan, shortage, `its driver gave no more: ${message}`);
}

const MOST_SUGGESTIONS = 3;

/** Up to three changes that fit: single ones first, then several at a time, the milder ones first. */
export function suggestionsFor(question: FitQuestion): Suggestion[] {
  const found: Suggestion[] = [];
  for (const suggestion of changes(question)) {
    found.push(suggestion);
    if (found.length === MOST_SUGGESTIONS) break;
  }
  return found;
}

function* changes({ load, replan, room, mayQuantize }: FitQuestion): Generator<Suggestion> {
  const { options } = load;
  const encodings = mayQuantize ? SMALLER[options.encoding] : [];
  const tried = (change: Partial<StageOptions>): Suggestion | undefined => {
    const plan = memoryPlan(replan(change), room.adapter);
    if (shortageOf(plan, room)) return undefined;
    const neededBytes = room.limitBytes === undefined ? plan.neededBytes : plan.peakBytes;
    return { flags: flagsOf(change), change, neededBytes };
  };
  const most = (limit: number, changeTo: (value: number) => Partial<StageOptions>, step = 1) => {
    const steps = largest(1, Math.floor(limit / step), (value) => fits(replan(changeTo(value * step)), room));
    return steps === undefined ? undefined : tried(changeTo(steps * step));
  };
  const { start, total } = options.span;
  const fewerLayers = (also: Partial<StageOptions>) =>
    most(options.span.end - start - 1, (layers) => ({ ...also, span: { start, end: start + layers, total } }));
  const shorterContext = (also: Partial<StageOptions>) =>
    most(options.maxContext - 1, (maxContext) => ({ ...also, maxContext }), CONTEXT_STEP);
  const fewerSessions = () => most(options.maxSessions - 1, (maxSessions) => ({ maxSessions }));
  const isThere = (suggestion: Suggestion | undefined) => suggestion !== undefined;

  yield* [fewerLayers({}), encodings.map((encoding) => tried({ encoding })).find(isThere)].filter(isThere);
  yield* [fewerSessions() ?? shorterContext({})].filter(isThere);

  const least = leastOf(options, encodings);
  const bases = Object.entries(least).map(([key, value]): Partial<StageOptions> => ({ [key]: value }));
  if (bases.length > 1) {
    bases.unshift(least);
    yield* [tried(least)].filter(isThere);
  }
  for (const base of bases) {
    if (tried(base)) continue; // said already
    yield* [shorterContext(base), fewerLayers(base)].filter(isThere);
  }
  // All at once: as many layers as go with a short context.
  for (const maxContext of SHORT_CONTEXTS) {
    if (maxContext < options.maxContext)
      yield* [fewerLayers({ ...leastOf(options, encodings), maxContext })].filter(isThere);
  }
}

/** The smallest encoding and one sequence. */
const leastOf = ({ maxSessions }: StageOptions, encodings: readonly Encoding[]): Partial<StageOptions> => ({
  ...(encodings.length > 0 ? { encoding: encodings.at(-1)! } : {}),
  ...(maxSessions > 1 ? { maxSessions: 1 } : {}),
});

/** A context that is no multiple of a few would be an odd thing to suggest, and a shorter one of no use. */
const CONTEXT_STEP = 32;
const SHORT_CONTEXTS = [512, 128, CONTEXT_STEP];

/** What holds weights in less, the mildest first. */
const SMALLER: Record<Encoding, readonly ("int8" | "nf4")[]> = {
  bf16: ["int8", "nf4"],
  int8: ["nf4"],
  nf4: [],
  fp4: [],
};

function flagsOf({ span, encoding, maxContext, maxSessions }: Partial<StageOptions>): string[] {
  return [
    ...(span ? ["--shard-end", `${span.end}`] : []),
    ...(encoding ? ["--quantization", encoding] : []),
    ...(maxContext === undefined ? [] : ["--max-context", `${maxContext}`]),
    ...(maxSessions === undefined ? [] : ["--max-sessions", `${maxSessions}`]),
  ];
}

function refusal(question: FitQuestion, plan: MemoryPlan, shortage: Shortage, why?: string): UserError {
  const { load, room } = question;
  const suggestions = suggestionsFor(question);
  const layers = `layers ${formatSpan(load.options.span)}`;
  const needed = formatBytes(shortage.neededBytes);
  const there = formatBytes(shortage.thereBytes);
  const headline = {
    limit: `${layers} need ${needed} on the device, and --memory-limit is ${there}`,
    memory: `${layers} need ${needed}, and ${room.adapter.name} has ${there}${why ? `; ${why}` : ""}`,
    binding: `a context of ${load.options.maxContext} tokens needs ${needed} in one piece, and ${room.adapter.name} binds at most ${there}`,
  }[shortage.of];
  const lines = [headline, "", ...memoryTable(plan.rows), "", ...roomLines(plan, room)];
  const message = lines.map((line, index) => (index === 0 || line === "" ? line : `  ${line}`)).join("\n");
  return new UserError("does_not_fit", message, hintOf(question, suggestions), {
    details: {
      needed: shortage.neededBytes,
      available: shortage.thereBytes,
      suggestions: suggestions.map(({ flags }) => flags),
    },
  });
}

function roomLines(plan: MemoryPlan, { adapter, memory, limitBytes, maxBindingBytes }: Room): string[] {
  const { availableBytes, totalBytes, source, isEstimate } = memory;
  const free =
    availableBytes === null
      ? `nobody tells how much memory ${adapter.name} has (${source})`
      : `${adapter.name} has ${formatBytes(availableBytes)} free of ${formatBytes(totalBytes ?? availableBytes)} (${isEstimate ? "an estimate: " : ""}${source})`;
  return [
    `in all ${formatBytes(plan.neededBytes)}, of which meshnet takes ${formatBytes(plan.peakBytes)} and the driver the rest`,
    free,
    ...(limitBytes === undefined ? [] : [`--memory-limit, for what meshnet takes: ${formatBytes(limitBytes)}`]),
    ...(plan.largestBuffer.bytes > maxBindingBytes
      ? [`largest piece: ${plan.largestBuffer.label}, ${formatBytes(plan.largestBuffer.bytes)}`]
      : []),
  ];
}

function hintOf({ load, replan, room, mayQuantize }: FitQuestion, suggestions: readonly Suggestion[]): string {
  if (suggestions.length === 0) {
    const { span, maxContext } = load.options;
    const least = leastOf(load.options, mayQuantize ? SMALLER[load.options.encoding] : []);
    const oneLayer = {
      ...least,
      maxContext: Math.min(CONTEXT_STEP, maxContext),
      span: { ...span, end: span.start + 1 },
    };
    const { neededBytes, peakBytes } = memoryPlan(replan(oneLayer), room.adapter);
    return `even one layer with the shortest context needs ${formatBytes(neededBytes)}, ${formatBytes(peakBytes)} of it for meshnet: take a device with more memory`;
  }
  const of = room.limitBytes === undefined ? "in all" : "of the limit";
  const lines = suggestions.map(({ flags, change, neededBytes }) => {
    const rest = change.span ? `, and another node for the layers from ${change.span.end} on` : "";
    return `${flags.join(" ")}  (${formatBytes(neededBytes)} ${of}${rest})`;
  });
  return [suggestions.length > 1 ? "any one of these would fit:" : "this would fit:", ...lines].join("\n    ");
}
