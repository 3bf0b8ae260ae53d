import { formatBytes } from "../../base/bytes.ts";
import { memoryPlan } from "../../weights/memory-plan.ts";
import { fitQuestion, largestEnd, type Room, suggestionsFor } from "../fit.ts";
import {
  DEFAULT_SESSIONS,
  ENCODINGS,
  type NodeConfig,
  planNode,
  type Quantization,
  QUANTIZATIONS,
  type Surroundings,
} from "../plan-node.ts";
import type { Finding } from "./check.ts";
import type { AdapterFacts } from "./probe.ts";

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
}

/** Contexts that are looked at besides the default, where the model has them. */
const CONTEXTS = [2048, 32_768];

/** What can this machine hold? Layers for each encoding and context, and the command that starts the node. */
export async function capacity(
  question: ModelQuestion,
  device: AdapterFacts | undefined,
  surroundings: Surroundings,
): Promise<Finding> {
  if (!device) {
    const remedy = "see the checks above: a model needs a device";
    return { status: "fail", found: `${question.modelId}: there is no device to hold it`, remedy };
  }
  const plan = await planNode({ ...question, host: "", port: 0, allowedHosts: [], allowedOrigins: [] }, surroundings);
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
  const quantizations: readonly string[] =
    question.quantization === undefined && mayQuantize ? QUANTIZATIONS : [plan.quantization];
  const encodingOf = (name: string) => (mayQuantize ? ENCODINGS[name as Quantization] : plan.load.options.encoding);
  const rows = quantizations.flatMap((quantization) =>
    contextsOf(question.maxContext, maxContext, plan.config.maxPositions).map((context): CapacityRow => {
      const change = { encoding: encodingOf(quantization), maxContext: context };
      const end = largestEnd((more) => replan({ ...change, ...more }), span, room) ?? null;
      const held = end === null ? null : memoryPlan(replan({ ...change, span: { ...span, end } }), device).neededBytes;
      return { quantization, maxContext: context, layers: (end ?? span.start) - span.start, end, neededBytes: held };
    }),
  );

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
    device: device.name,
    availableBytes: device.memory.availableBytes,
    memoryLimit: question.memoryLimit ?? null,
    maxSessions,
    rows,
  };
  const title = `${model.id} (${model.type}, ${model.layers} layers) on ${device.name}`;
  if (!best || best.end === null) {
    const others = suggestionsFor(asked).map(({ flags }) => flags.join(" "));
    const remedy =
      others.length > 0
        ? `this would fit: ${others.join("; or ")}`
        : "not even one layer fits, with the shortest context: take a device with more memory";
    return {
      status: "fail",
      found: `${title}: no layer fits`,
      details: tableOf(rows),
      remedy,
      facts: { ...facts, command: null },
    };
  }
  const command = commandFor(question, best, mayQuantize, span.total);
  const rest =
    best.end < (question.shardEnd ?? span.total) ? `; layers ${best.end} on go to another node (--next)` : "";
  return {
    status: "ok",
    found: `${title}: layers ${span.start}-${best.end} of ${span.total} as ${best.quantization}, ${formatBytes(best.neededBytes!)}${rest}`,
    details: [...tableOf(rows), `start it with: ${command.map(quoted).join(" ")}`],
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
  total: number,
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
    ...(memoryLimit === undefined ? [] : ["--memory-limit", `${memoryLimit}`]),
    ...(device === "auto" ? [] : ["--device", device]),
    ...(cacheDir === undefined ? [] : ["--cache-dir", cacheDir]),
    ...(offline ? ["--offline"] : []),
    ...(end === total ? [] : ["--next", "URL"]),
  ];
}

const quoted = (word: string): string => (/^[\w./:=@-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** A row for each encoding, a column for each context. */
function tableOf(rows: readonly CapacityRow[]): string[] {
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
          .map(({ layers, neededBytes }) => (neededBytes === null ? "0" : `${layers} (${formatBytes(neededBytes)})`)),
      ]),
    ),
  ];
}
