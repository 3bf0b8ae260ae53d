import { formatBytes, sizeFlag } from "../../base/bytes.ts";
import { isHead } from "../../base/span.ts";
import { memoryPlan } from "../../weights/memory-plan.ts";
import { describeShortage, fitQuestion, largestEnd, type Room, shortageOf, waysOut } from "../fit.ts";
import {
  DEFAULT_SESSIONS,
  ENCODINGS,
  type NodeConfig,
  planNode,
  type Quantization,
  QUANTIZATIONS,
  type Surroundings,
} from "../plan-node.ts";
import { textProblem } from "../text-problem.ts";
import type { Finding } from "./check.ts";
import { type Place, placeFlags, placeNotes } from "./place.ts";
import { type AdapterFacts, selectorOf } from "./probe.ts";

/** The model that the question is about, and the flags that a node would have. */
export type ModelQuestion = Pick<
  NodeConfig,
  | "modelId"
  | "revision"
  | "shardStart"
  | "shardEnd"
  | "quantization"
  | "maxContext"
  | "maxSessions"
  | "memoryLimit"
  | "offline"
  | "cacheDir"
  | "device"
>;

/** How many layers fit, from the first one that was asked for. */
export interface CapacityRow {
  readonly quantization: string;
  readonly maxContext: number;
  readonly layers: number;
  /** The layer after the last one that fits; null where not even one does. */
  readonly end: number | null;
  /** What those layers need, the driver included. */
  readonly neededBytes: number | null;
  /** Of that what meshnet takes, which `--memory-limit` bounds. */
  readonly ownBytes: number | null;
}

/** Contexts that are looked at besides the default, where the model has them. */
const CONTEXTS = [2048, 32_768];

/** What can this machine hold? Layers for each encoding and context, and the command that starts the node. */
export async function capacity(
  question: ModelQuestion,
  place: Place,
  device: AdapterFacts | undefined,
  surroundings: Surroundings,
): Promise<Finding> {
  if (!device) {
    const remedy = "see the checks above: a model needs a device";
    return { status: "fail", found: `${question.modelId}: there is no device to hold it`, remedy };
  }
  const plan = await planNode({ ...question, ...place, allowedHosts: [], allowedOrigins: [] }, surroundings);
  using snapshot = plan.snapshot;
  const room: Room = {
    adapter: device,
    memory: device.memory,
    limitBytes: question.memoryLimit,
    maxBindingBytes: device.limits.bindingBytes,
  };
  const asked = fitQuestion(plan, room);
  const { replan, mayQuantize } = asked;
  const { span, maxContext, maxSessions } = plan.load.options;
  const reasons: string[] = [];
  const quantizations: readonly string[] =
    question.quantization === undefined && mayQuantize ? QUANTIZATIONS : [plan.quantization];
  const encodingOf = (name: string) => (mayQuantize ? ENCODINGS[name as Quantization] : plan.load.options.encoding);
  const beside = { those: 0, one: 0 };
  const rows = quantizations.flatMap((quantization) =>
    contextsOf(question.maxContext, maxContext, plan.config.maxPositions).map((context): CapacityRow => {
      const change = { encoding: encodingOf(quantization), maxContext: context };
      const end = largestEnd((more) => replan({ ...change, ...more }), span, room) ?? null;
      const own = { quantization, maxContext: context, end };
      if (end === null) {
        const one = replan({ ...change, span: { ...span, end: span.start + 1 } });
        const needs = memoryPlan(one, device);
        const why = describeShortage({ ...asked, load: one }, needs, shortageOf(needs, room)!);
        reasons.push(`${quantization} with ${context} tokens: ${why}`);
        beside.one = Math.max(beside.one, needs.neededBytes - needs.peakBytes);
        return { ...own, layers: 0, neededBytes: null, ownBytes: null };
      }
      const { neededBytes, peakBytes } = memoryPlan(replan({ ...change, span: { ...span, end } }), device);
      beside.those = Math.max(beside.those, neededBytes - peakBytes);
      return { ...own, layers: end - span.start, neededBytes, ownBytes: peakBytes };
    }),
  );

  const limit = question.memoryLimit;
  const wanted = rows.filter((row) => row.maxContext === maxContext);
  const most = Math.max(...wanted.map(({ layers }) => layers));
  const best = wanted.find(({ layers }) => layers === most); // the first is the one that changes the weights least
  const model = {
    id: snapshot.modelId,
    revision: snapshot.revision,
    type: plan.config.modelType,
    layers: span.total,
  };
  const facts = {
    model,
    device: selectorOf(device),
    availableBytes: device.memory.availableBytes,
    memoryLimit: question.memoryLimit ?? null,
    maxSessions,
    rows,
  };
  const title = `${model.id} (${model.type}, ${model.layers} layers) on ${selectorOf(device)}`;
  const table = tableOf(rows, limit, beside.those || beside.one);
  if (!best || best.end === null) {
    const [lead, ...ways] = waysOut(asked);
    return {
      status: "fail",
      found: `${title}: no layer fits`,
      details: [...table, ...reasons],
      remedy: [lead, ways.join("; or ")].filter(Boolean).join(" "),
      facts: { ...facts, command: null },
    };
  }
  if (isHead(span)) {
    const problem = await textProblem(snapshot);
    if (problem) {
      const found = `${title}: layers fit, and a head cannot start: ${problem.message}`;
      const details = [...table, ...reasons];
      return { status: "fail", found, details, remedy: problem.hint, facts: { ...facts, command: null } };
    }
  }
  const command = [...commandFor(question, best, mayQuantize), ...placeFlags(place)];
  const rest = best.end < (question.shardEnd ?? span.total) ? `; layers ${best.end} on go to another node` : "";
  const next = `as the layers go on at ${best.end}, add --next and the URL of the node that begins there`;
  const size = limit === undefined ? best.neededBytes! : best.ownBytes!;
  return {
    status: "ok",
    found: `${title}: layers ${span.start}-${best.end} of ${span.total} as ${best.quantization}, ${formatBytes(size)}${rest}`,
    details: [
      ...table,
      ...reasons,
      `start it with: ${command.map(quoted).join(" ")}`,
      ...placeNotes(place),
      ...(best.end < span.total ? [next] : []),
    ],
    facts: { ...facts, command },
  };
}

function contextsOf(given: number | undefined, usual: number, most: number): number[] {
  if (given !== undefined) return [given];
  const all = [...CONTEXTS.filter((context) => context < most), usual, most];
  return [...new Set(all)].toSorted((a, b) => a - b);
}

function commandFor(
  question: ModelQuestion,
  { quantization, maxContext, end }: CapacityRow,
  mayQuantize: boolean,
): string[] {
  const { modelId, revision, shardStart, maxSessions, memoryLimit, cacheDir, offline, device } = question;
  const isUsualContext = question.maxContext === undefined;
  return [
    "meshnet",
    "node",
    "--model-id",
    modelId,
    ...(revision === undefined ? [] : ["--revision", revision]),
    "--shard-start",
    `${shardStart}`,
    "--shard-end",
    `${end}`,
    ...(mayQuantize && quantization !== "bfloat16" ? ["--quantization", quantization] : []),
    ...(isUsualContext ? [] : ["--max-context", `${maxContext}`]),
    ...(maxSessions === undefined || maxSessions === DEFAULT_SESSIONS ? [] : ["--max-sessions", `${maxSessions}`]),
    ...(memoryLimit === undefined ? [] : ["--memory-limit", sizeFlag(memoryLimit)]),
    ...(device === "auto" ? [] : ["--device", device]),
    ...(cacheDir === undefined ? [] : ["--cache-dir", cacheDir]),
    ...(offline ? ["--offline"] : []),
  ];
}

const quoted = (word: string): string => (/^[\w./:=@-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** A row for each encoding, a column for each context. Under a limit the sizes are what it bounds; `beside`: what the driver takes. */
function tableOf(rows: readonly CapacityRow[], limit: number | undefined, beside: number): string[] {
  const contexts = [...new Set(rows.map(({ maxContext }) => maxContext))];
  const names = [...new Set(rows.map(({ quantization }) => quantization))];
  const line = (cells: readonly string[]) =>
    cells
      .map((cell, at) => cell.padEnd(at === 0 ? 22 : 16))
      .join("")
      .trimEnd();
  return [
    line(["layers that fit, with", ...contexts.map((context) => `${context} tokens`)]),
    ...names.map((name) =>
      line([
        name,
        ...rows
          .filter(({ quantization }) => quantization === name)
          .map(({ layers, neededBytes, ownBytes }) => {
            const bytes = limit === undefined ? neededBytes : ownBytes;
            return bytes === null ? "0" : `${layers} (${formatBytes(bytes)})`;
          }),
      ]),
    ),
    limit === undefined
      ? "the sizes include what the driver takes"
      : `the sizes are what --memory-limit (${formatBytes(limit)}) bounds; the driver takes up to ${formatBytes(beside)} beside them`,
  ];
}
