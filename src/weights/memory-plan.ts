import { formatBytes, sum } from "../base/bytes.ts";
import { formatSpan } from "../base/span.ts";
import { readbackBytes, UNIFORM_BYTES } from "../gpu/commands.ts";
import { tensorBytes } from "../gpu/tensor.ts";
import type { Encoding, WeightSpec } from "../nn/index.ts";
import { IN_FLIGHT_BYTES } from "./load.ts";
import type { LoadPlan, PlannedBuffer, PlannedWeight } from "./plan.ts";
import { codeWords, scaleCount } from "./quantize.ts";

/**
 * What a byte of the device is for. `weights` to `staging` are taken for good: together they are what the loader allocates.
 * `loading` is taken on the way and given back. `driver` is what others take beside us: compiled kernels, rounding up.
 */
export type MemoryCategory = "weights" | "kv cache" | "activations" | "staging" | "loading" | "driver";

export interface MemoryRow {
  readonly category: MemoryCategory;
  /** For people: "layers 0-12, nf4". */
  readonly detail: string;
  readonly bytes: number;
}

export interface MemoryPlan {
  readonly rows: readonly MemoryRow[];
  /** What stays: `/info` holds it against what was allocated. */
  readonly plannedBytes: number;
  /** The most that meshnet itself has on the device at a time, which is while it loads: what `--memory-limit` bounds. */
  readonly peakBytes: number;
  /** With what the driver takes beside it: what must be free. */
  readonly neededBytes: number;
  /** The largest buffer that cannot be split: a kernel must be able to bind it whole. */
  readonly largestBuffer: { readonly label: string; readonly bytes: number };
}

/** What decides how much a driver takes for itself. */
export interface DriverNeeds {
  /** The device is the CPU: compiler and process share its memory. */
  readonly isSoftware: boolean;
}

/** The load plan as bytes by purpose: a sum over the very rows that the loader walks. Without a `driver` its rows are left out. */
export function memoryPlan(load: LoadPlan, driver?: DriverNeeds): MemoryPlan {
  const own = [
    ...weightRows(load),
    ...bufferRows(load),
    { category: "staging", detail: "parameters of kernels, and results on their way out", bytes: commandBytes(load) },
  ] satisfies MemoryRow[];
  const plannedBytes = bytesOf(own);
  const loading = loadingRows(load);
  const beside = driver ? driverRows(driver, plannedBytes) : [];
  const peakBytes = plannedBytes + bytesOf(loading);
  const largest = load.buffers.reduce((most, buffer) => (buffer.deviceBytes > most.deviceBytes ? buffer : most));
  return {
    rows: [...own, ...loading, ...beside].filter(({ bytes }) => bytes > 0),
    plannedBytes,
    peakBytes,
    neededBytes: peakBytes + bytesOf(beside),
    largestBuffer: { label: largest.label, bytes: largest.deviceBytes },
  };
}

/** The most bytes that are read back at once, in a pass or (scales) while weights are quantized. */
export function largestRead({ buffers, weights }: LoadPlan): number {
  const wire = buffers.find(({ label }) => label === "wire")?.deviceBytes ?? 0;
  const scales = weights.map(({ encoding, stored, specs: [spec] }) =>
    encoding === "bf16" || stored ? 0 : 4 * scaleCount(spec!.rows, spec!.columns, encoding),
  );
  return scales.reduce((most, bytes) => Math.max(most, bytes), wire);
}

const commandBytes = (load: LoadPlan): number => UNIFORM_BYTES + readbackBytes(largestRead(load));

function weightRows(load: LoadPlan): MemoryRow[] {
  const detailOf = ({ specs, encoding }: PlannedWeight): string => {
    const [spec] = specs as readonly [WeightSpec, ...WeightSpec[]];
    const layers = `layers ${formatSpan(load.options.span)}`;
    if (spec.kind === "vector") return isOfLayer(spec) ? `${layers}, vectors in float32` : "final norm in float32";
    if (isOfLayer(spec)) return `${layers}, ${ENCODINGS[encoding]}`;
    const roles = new Set(specs.map(({ gathered }) => (gathered ? "embeddings" : "head")));
    return `${[...roles].toSorted().join(" and ")}, ${ENCODINGS[encoding]}`;
  };
  return grouped(load.weights, "weights", detailOf);
}

/** Names of a layer's parameters have its number in them. */
const isOfLayer = ({ names }: WeightSpec): boolean => /(^|\.)\d+\./.test(names[0]!);

const ENCODINGS: Record<Encoding, string> = { bf16: "bfloat16", int8: "int8", nf4: "nf4", fp4: "fp4" };

/** What is neither cache, staging nor logits is an activation or a table: what a module adds is counted without a word here. */
function bufferRows(load: LoadPlan): MemoryRow[] {
  const { maxContext, maxSessions } = load.options;
  const of = (test: RegExp) => load.buffers.filter(({ label, paged }) => !paged && test.test(label));
  const cache = load.buffers.filter(({ paged }) => paged);
  const staging = of(STAGING);
  const logits = of(LOGITS);
  const rest = load.buffers.filter((buffer) => ![cache, staging, logits].some((group) => group.includes(buffer)));
  const row = (category: MemoryCategory, detail: string, buffers: readonly PlannedBuffer[]): MemoryRow => ({
    category,
    detail,
    bytes: sum(buffers.map(({ deviceBytes }) => deviceBytes)),
  });
  return [
    row("kv cache", `${maxSessions} × ${maxContext} tokens`, cache),
    row("activations", `passes of up to ${load.maxTokens} tokens`, rest),
    row("activations", "logits", logits),
    row("staging", "weights, hidden states and logits on their way in and out", staging),
  ];
}

const STAGING = /^(upload|wire)$/;
const LOGITS = /^(logits|gathered|gather_index|argmax)/;

/** What is taken for a moment: the matrix that is being quantized, and what the driver copies of written bytes. */
function loadingRows({ weights, buffers }: LoadPlan): MemoryRow[] {
  const quantizing = weights.map(({ encoding, stored, specs: [spec] }) => {
    if (encoding === "bf16") return 0;
    const { rows, columns, stack } = spec!;
    // An expert's codes lie beside their stack until they are copied into it.
    const beside = stack
      ? tensorBytes(rows, codeWords(columns, encoding), "u32") +
        tensorBytes(1, scaleCount(rows, columns, encoding), "f32")
      : 0;
    if (stored) return beside;
    return beside + tensorBytes(rows, columns, "bf16") + (encoding === "int8" ? tensorBytes(1, rows, "f32") : 0);
  });
  const wire = buffers.find(({ label }) => label === "wire")?.deviceBytes ?? 0;
  return [
    {
      category: "loading",
      detail: "the largest matrix in bfloat16, while it is quantized",
      bytes: quantizing.reduce((most, bytes) => Math.max(most, bytes), 0),
    },
    { category: "loading", detail: "copies of what is written to the device", bytes: Math.max(IN_FLIGHT_BYTES, wire) },
  ];
}

/**
 * Measured with lavapipe 25.0.7 and SwiftShader 5.0.0: what a node grew by beside the plan until its kernels were compiled and
 * had run for several callers, 73 to 110 MiB and 48 to 101 MiB by encoding and family: with the reserve this is more. On a GPU,
 * where compiled kernels take little, an estimate.
 */
const COMPILER_BYTES = { software: 96 * 2 ** 20, gpu: 32 * 2 ** 20 };
/** What a driver that computes on the CPU takes more than a GPU's. */
export const SOFTWARE_EXTRA_BYTES = COMPILER_BYTES.software - COMPILER_BYTES.gpu;
/** Drivers hand out memory in blocks, and a system with none left is of no use. */
const RESERVE = { share: 0.02, leastBytes: 32 * 2 ** 20 };

function driverRows({ isSoftware }: DriverNeeds, plannedBytes: number): MemoryRow[] {
  const compiler = COMPILER_BYTES[isSoftware ? "software" : "gpu"];
  const reserve = Math.max(RESERVE.leastBytes, Math.ceil(plannedBytes * RESERVE.share));
  return [
    { category: "driver", detail: "the driver's compiler and compiled kernels", bytes: compiler },
    { category: "driver", detail: "reserve", bytes: reserve },
  ];
}

function grouped(
  weights: readonly PlannedWeight[],
  category: MemoryCategory,
  detailOf: (weight: PlannedWeight) => string,
): MemoryRow[] {
  return [...Map.groupBy(weights, detailOf)].map(([detail, group]) => ({
    category,
    detail,
    bytes: sum(group.map(({ deviceBytes }) => deviceBytes)),
  }));
}

const bytesOf = (rows: readonly MemoryRow[]): number => sum(rows.map(({ bytes }) => bytes));

/** The rows as a table for a terminal, a line each. */
export function memoryTable(rows: readonly MemoryRow[]): string[] {
  const cells = rows.map(({ category, detail, bytes }) => ({ category, detail, size: formatBytes(bytes) }));
  const width = (key: "category" | "detail" | "size") => Math.max(...cells.map((cell) => cell[key].length));
  const [category, detail, size] = [width("category"), width("detail"), width("size")];
  return cells.map(
    (cell) => `${cell.category.padEnd(category)}  ${cell.detail.padEnd(detail)}  ${cell.size.padStart(size)}`,
  );
}
