import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import type { AdapterSummary } from "../gpu/adapter.ts";
import type { Device } from "../gpu/device.ts";
import { type DeviceMemory, deviceMemory } from "../gpu/memory.ts";
import type { StageOptions } from "../models/index.ts";
import { type DriverNeeds, type MemoryPlan, memoryPlan, memoryTable } from "../weights/memory-plan.ts";
import { type LoadPlan, planLoad } from "../weights/plan.ts";
import type { NodePlan } from "./plan-node.ts";

/** The place that a plan must fit into. */
export interface Room {
  readonly adapter: Pick<AdapterSummary, "name" | "isSoftware">;
  readonly memory: DeviceMemory;
  /** `--memory-limit`: the most that meshnet itself may have on the device. */
  readonly limitBytes?: number;
  /** What the driver gave of the plan before it refused more, where it has been tried. */
  readonly grantedBytes?: number;
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

/** What a plan takes of a device, the driver of that one included where it is known: a line for each purpose, and the sum. */
export function describeMemory(load: LoadPlan, driver?: DriverNeeds): string[] {
  const { rows, plannedBytes, peakBytes, neededBytes } = memoryPlan(load, driver);
  const beside = driver ? `${formatBytes(neededBytes)} with what the driver takes` : "beside what the driver takes";
  return [
    ...memoryTable(rows),
    `${formatBytes(plannedBytes)} of the device for good, ${formatBytes(peakBytes)} while it loads, ${beside}`,
  ];
}

/** What is too small, and for what. */
export type Shortage =
  | { readonly of: "memory" | "limit"; readonly neededBytes: number; readonly thereBytes: number }
  | { readonly of: "binding"; readonly neededBytes: number; readonly thereBytes: number };

/** Why the plan does not fit; undefined where it does, or where nothing is known of the device's memory. */
export function shortageOf(plan: MemoryPlan, room: Room): Shortage | undefined {
  const { memory, limitBytes, grantedBytes = Infinity, maxBindingBytes } = room;
  const { bytes } = plan.largestBuffer;
  if (bytes > maxBindingBytes) return { of: "binding", neededBytes: bytes, thereBytes: maxBindingBytes };
  if (limitBytes !== undefined && plan.peakBytes > limitBytes)
    return { of: "limit", neededBytes: plan.peakBytes, thereBytes: limitBytes };
  if (plan.peakBytes > grantedBytes) return { of: "memory", neededBytes: plan.peakBytes, thereBytes: grantedBytes };
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
  /** Where `--memory-limit` is raised too: the least that it must be. */
  readonly limitBytes?: number;
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
  const room = { ...question.room, grantedBytes };
  const plan = memoryPlan(question.load, room.adapter);
  const shortage = { of: "memory", neededBytes: plan.peakBytes, thereBytes: grantedBytes } as const;
  return refusal({ ...question, room }, plan, shortage, `its driver gave no more: ${message}`);
}

const MOST_SUGGESTIONS = 3;

/**
 * Up to three changes that fit, each as mild as it can be and of another kind: changes of one flag first, several at a time
 * only where none of them is enough without the others. Raising the limit comes last.
 */
export function suggestionsFor(question: FitQuestion): Suggestion[] {
  const axes = axesOf(question);
  const fitsWith = (change: Change) => fits(question.replan(optionsOf(change)), roomWith(change, question.room));
  if (!fitsWith(together(axes, () => 1))) return [];
  const found: { axes: readonly Axis[]; change: Change }[] = [];
  for (const some of subsets(axes)) {
    if (found.length === MOST_SUGGESTIONS) break;
    if (found.some((less) => less.axes.every((axis) => some.includes(axis)))) continue; // enough without the rest
    const change = mildest(some, fitsWith);
    if (change) found.push({ axes: some, change });
  }
  return found
    .map(({ change }) => suggestionOf(change, question))
    .toSorted((a, b) => Number(a.limitBytes !== undefined) - Number(b.limitBytes !== undefined));
}

/** What is given in place of what was given; `unlimited`: `--memory-limit` is raised as far as is needed. */
type Change = Partial<StageOptions> & { readonly unlimited?: true };

/** A flag whose value may be milder or harsher. */
interface Axis {
  readonly kind: "limit" | "layers" | "encoding" | "sessions" | "context";
  /** Value 1 takes the least memory, each further one more, and `values` is nearest to what was given. */
  readonly values: number;
  readonly change: (value: number) => Change;
}

function axesOf({ load, room, mayQuantize }: FitQuestion): Axis[] {
  const { span, encoding, maxContext, maxSessions } = load.options;
  const { start, end, total } = span;
  const encodings = mayQuantize ? SMALLER[encoding].toReversed() : [];
  const axes: Axis[] = [
    { kind: "limit", values: room.limitBytes === undefined ? 0 : 1, change: () => ({ unlimited: true }) },
    {
      kind: "layers",
      values: end - start - 1,
      change: (layers) => ({ span: { start, end: start + layers, total } }),
    },
    { kind: "encoding", values: encodings.length, change: (value) => ({ encoding: encodings[value - 1]! }) },
    { kind: "sessions", values: maxSessions - 1, change: (sessions) => ({ maxSessions: sessions }) },
    {
      kind: "context",
      values: Math.floor((maxContext - 1) / CONTEXT_STEP),
      change: (steps) => ({ maxContext: steps * CONTEXT_STEP }),
    },
  ];
  return axes.filter(({ values }) => values > 0);
}

/** The smaller ones first. */
function subsets(axes: readonly Axis[]): Axis[][] {
  const all = Array.from({ length: 2 ** axes.length - 1 }, (_, at) => axes.filter((_, bit) => ((at + 1) >> bit) & 1));
  return all.toSorted((a, b) => a.length - b.length);
}

const together = (axes: readonly Axis[], valueOf: (axis: Axis) => number): Change =>
  Object.assign({}, ...axes.map((axis) => axis.change(valueOf(axis))));

/** Each of the axes as mild as it can be beside the others, or undefined where even the harshest values do not fit. */
function mildest(axes: readonly Axis[], fitsWith: (change: Change) => boolean): Change | undefined {
  const values = new Map(axes.map((axis) => [axis, 1]));
  const changeWith = (axis?: Axis, value = 1) => together(axes, (one) => (one === axis ? value : values.get(one)!));
  if (!fitsWith(changeWith())) return undefined;
  for (const [kind, most] of RELAXED) {
    const axis = axes.find((one) => one.kind === kind);
    if (!axis) continue;
    const least = values.get(axis)!;
    const best = largest(least, Math.min(most, axis.values), (value) => fitsWith(changeWith(axis, value)));
    values.set(axis, best ?? least);
  }
  return changeWith();
}

/** A context that is no multiple of a few would be an odd thing to suggest, and a shorter one of no use. */
const CONTEXT_STEP = 32;

/** Which has the room first where several flags change: before layers and sequences a context of 512, which is of use. */
const RELAXED = [
  ["encoding", Infinity],
  ["context", 512 / CONTEXT_STEP],
  ["layers", Infinity],
  ["sessions", Infinity],
  ["context", Infinity],
] as const;

function optionsOf(change: Change): Partial<StageOptions> {
  const { unlimited: _, ...options } = change;
  return options;
}

const roomWith = ({ unlimited }: Change, room: Room): Room => (unlimited ? { ...room, limitBytes: undefined } : room);

function suggestionOf(change: Change, { replan, room }: FitQuestion): Suggestion {
  const options = optionsOf(change);
  const { peakBytes, neededBytes } = memoryPlan(replan(options), room.adapter);
  const flags = flagsOf(options);
  const isOurs = room.limitBytes !== undefined || room.grantedBytes !== undefined;
  const suggestion = { flags, change: options, neededBytes: isOurs ? peakBytes : neededBytes };
  if (!change.unlimited) return suggestion;
  const mebibytes = Math.ceil(peakBytes / (MIB / 10)) / 10;
  const limitBytes = Math.round(mebibytes * MIB);
  return { ...suggestion, flags: [...flags, "--memory-limit", `${mebibytes}MiB`], limitBytes };
}

const MIB = 2 ** 20;

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
  const { room } = question;
  const suggestions = suggestionsFor(question);
  const headline = describeShortage(question, plan, shortage) + (why ? `; ${why}` : "");
  const lines = [headline, "", ...memoryTable(plan.rows), "", ...roomLines(plan, room)];
  const message = lines.map((line, index) => (index === 0 || line === "" ? line : `  ${line}`)).join("\n");
  return new UserError("does_not_fit", message, waysOut(question, suggestions).join("\n    "), {
    details: {
      needed: shortage.neededBytes,
      available: shortage.thereBytes,
      suggestions: suggestions.map(({ flags }) => flags),
    },
  });
}

/** What is too small for what, in one line. */
export function describeShortage({ load, room }: FitQuestion, plan: MemoryPlan, shortage: Shortage): string {
  const layers = `layers ${formatSpan(load.options.span)}`;
  const needed = formatBytes(shortage.neededBytes);
  const there = formatBytes(shortage.thereBytes);
  switch (shortage.of) {
    case "limit":
      return `${layers} need ${needed} on the device, and --memory-limit is ${there}`;
    case "memory":
      return `${layers} need ${needed}, and ${room.adapter.name} has ${there}`;
    case "binding":
      return `${largestPiece(load, plan)} needs ${needed} in one piece, and ${room.adapter.name} binds at most ${there}`;
  }
}

/** What the largest buffer is for, in the words of the flags that make it smaller. */
function largestPiece({ options, buffers, maxTokens }: LoadPlan, { largestBuffer: { label } }: MemoryPlan): string {
  const isCache = buffers.some((buffer) => buffer.label === label && buffer.paged);
  const { maxSessions, maxContext } = options;
  return isCache
    ? `a layer's cache of ${maxSessions} ${maxSessions === 1 ? "sequence" : "sequences"} of ${maxContext} tokens (--max-sessions, --max-context)`
    : `a pass of ${maxTokens} tokens (${label})`;
}

function roomLines(plan: MemoryPlan, { adapter, memory, limitBytes, maxBindingBytes }: Room): string[] {
  return [
    `in all ${formatBytes(plan.neededBytes)}, of which meshnet takes ${formatBytes(plan.peakBytes)} and the driver the rest`,
    describeFree({ adapter, memory }),
    ...(limitBytes === undefined ? [] : [`--memory-limit, for what meshnet takes: ${formatBytes(limitBytes)}`]),
    ...(plan.largestBuffer.bytes > maxBindingBytes
      ? [`largest piece: ${plan.largestBuffer.label}, ${formatBytes(plan.largestBuffer.bytes)}`]
      : []),
  ];
}

/** What a device has, and who says so. */
export function describeFree({ adapter, memory }: Pick<Room, "adapter" | "memory">): string {
  const { availableBytes, totalBytes, source, isEstimate } = memory;
  return availableBytes === null
    ? `nobody tells how much memory ${adapter.name} has (${source})`
    : `${adapter.name} has ${formatBytes(availableBytes)} free of ${formatBytes(totalBytes ?? availableBytes)} (${isEstimate ? "an estimate: " : ""}${source})`;
}

/** The changes for people: a line that leads to them, then one for each. */
export function waysOut(
  question: FitQuestion,
  suggestions: readonly Suggestion[] = suggestionsFor(question),
): string[] {
  const { limitBytes, grantedBytes } = question.room;
  if (suggestions.length === 0) return [`even ${leastOf(question)}: take a device with more memory`];
  const of = limitBytes !== undefined ? "of the limit" : grantedBytes !== undefined ? "of the device" : "in all";
  const lines = suggestions.map(({ flags, change, neededBytes, limitBytes: raised }) => {
    const rest = change.span ? `, and another node for the layers from ${change.span.end} on` : "";
    const size = raised === undefined ? `${formatBytes(neededBytes)} ${of}` : RAISE;
    return `${flags.join(" ")}  (${size}${rest})`;
  });
  const lead = suggestions.length > 1 ? "any one of these would fit:" : "this would fit:";
  const isLimitToBlame = suggestions.every((suggestion) => suggestion.limitBytes !== undefined);
  return [isLimitToBlame ? `below this limit nothing fits, for even ${leastOf(question)}; ${lead}` : lead, ...lines];
}

const RAISE = "raise --memory-limit to at least that, or leave it away";

/** The least that a node of this model takes, with all that may be changed. */
function leastOf({ load, replan, room, mayQuantize }: FitQuestion): string {
  const { span, maxContext, encoding } = load.options;
  const plans = [encoding, ...(mayQuantize ? SMALLER[encoding] : [])].map((smaller) => {
    const options = { maxContext: Math.min(CONTEXT_STEP, maxContext), maxSessions: 1, encoding: smaller };
    return memoryPlan(replan({ ...options, span: { ...span, end: span.start + 1 } }), room.adapter);
  });
  const { neededBytes, peakBytes } = plans.toSorted((a, b) => a.peakBytes - b.peakBytes)[0]!;
  return `one layer with the shortest context needs ${formatBytes(neededBytes)}, ${formatBytes(peakBytes)} of it for meshnet`;
}
