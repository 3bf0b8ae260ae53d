import { ceilDiv, sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import { tensorBytes } from "../gpu/tensor.ts";
import { type Family, logitRowsFor, type ModelConfig, type StageOptions } from "../models/index.ts";
import { type Encoding, PAGE_TOKENS, type TemporarySpec, type WeightSpec } from "../nn/index.ts";
import type { Checkpoint, CheckpointTensor } from "../safetensors/checkpoint.ts";
import { findBlockScales, scalesName } from "./fp8.ts";
import { codeWords, NF4_BLOCK, scaleCount } from "./quantize.ts";
import { companionsOf, findStored, isStoredCodeBook, storedNames, type StoredWeight } from "./stored.ts";

/** One parameter: where it comes from, and what it takes. The loader walks these very objects. */
export interface PlannedWeight {
  readonly source: CheckpointTensor;
  /** Every parameter that reads this tensor: two where a head is tied to the embedding. */
  readonly specs: readonly WeightSpec[];
  readonly encoding: Encoding;
  /** Where the checkpoint has it quantized already: its codes are taken as they are. */
  readonly stored?: StoredWeight;
  /** Where it is FP8: the factors of its blocks. */
  readonly blockScales?: CheckpointTensor;
  readonly deviceBytes: number;
}

/** One place for activations, for a layer's cache or for tables. */
export interface PlannedBuffer {
  readonly label: string;
  readonly rows: number;
  readonly columns: number;
  readonly type: TemporarySpec["type"];
  /** A layer's cache: its rows belong to the cache's pages. */
  readonly paged: boolean;
  readonly deviceBytes: number;
}

export interface LoadPlan {
  readonly options: StageOptions;
  /** The most tokens that one pass takes. */
  readonly maxTokens: number;
  /** Pages of the cache: `maxSessions` sequences of `maxContext` tokens. */
  readonly pages: number;
  readonly weights: readonly PlannedWeight[];
  readonly buffers: readonly PlannedBuffer[];
  /** Every tensor that is read. */
  readonly sources: readonly CheckpointTensor[];
  /** Bytes that the files give up. */
  readonly readBytes: number;
  readonly weightBytes: number;
  readonly bufferBytes: number;
  /** Everything on the device. */
  readonly deviceBytes: number;
  /** The largest tensor: the buffer a device should be able to hold, though weights can be split. */
  readonly largestBytes: number;
}

/** The most rows of a call: their last tokens are gathered for the head. */
export const MAX_ROWS = 1024;
/** Tokens of a pass: enough for a GPU to be busy with, and activations of few megabytes. */
const PASS_TOKENS = 512;
/** A weight whose file has it transposed passes through the device in pieces of this size. */
export const UPLOAD_BYTES = 8 * 2 ** 20;

const withStored = ({ names, kind, quantizable }: WeightSpec): string[] =>
  names.flatMap((name) => [
    name,
    ...(quantizable ? storedNames(name) : []),
    ...(kind === "matrix" ? [scalesName(name)] : []),
  ]);

/** The names of the tensors that the span needs, whichever prefix the checkpoint uses. */
export function neededNames(family: Family, config: ModelConfig, options: StageOptions): Set<string> {
  const specs = family.specs(config, options).flatMap((module) => module.weights);
  const names = specs.flatMap(withStored);
  return new Set(family.prefixes.flatMap((prefix) => names.map((name) => prefix + name)));
}

/**
 * Tensors that no layer of this model has and no checkpoint of its family carries by habit: an adapter, a head for
 * another task. They are not read, and what the model was meant to say with them is lost: somebody should know.
 */
export function unexpectedNames(
  family: Family,
  config: ModelConfig,
  options: StageOptions,
  checkpoint: Checkpoint,
): string[] {
  const known = neededNames(family, config, {
    ...options,
    span: { start: 0, end: config.layers, total: config.layers },
  });
  const isKnown = (name: string) =>
    known.has(name) ||
    isStoredCodeBook(name) ||
    family.ignored.test(name) ||
    (family.mayHaveMoreLayers && layerOf(name) >= config.layers);
  return [...checkpoint.tensors.keys()].filter((name) => !isKnown(name));
}

const layerOf = (name: string): number => Number(/(?:^|\.)layers\.(\d+)\./.exec(name)?.[1] ?? -1);

/**
 * Everything that loading the span will do, decided without a device and without reading a tensor.
 * @throws UserError `bad_model` when a parameter is missing or has another shape than the configuration says.
 */
export function planLoad(family: Family, config: ModelConfig, options: StageOptions, checkpoint: Checkpoint): LoadPlan {
  const modules = family.specs(config, options);
  const pages = options.maxSessions * ceilDiv(options.maxContext, PAGE_TOKENS);
  const maxTokens = Math.min(options.passTokens ?? PASS_TOKENS, pages * PAGE_TOKENS);

  const bySource = new Map<CheckpointTensor, WeightSpec[]>();
  for (const spec of modules.flatMap((module) => module.weights)) {
    const source = findTensor(spec, family, checkpoint, options);
    bySource.set(source, [...(bySource.get(source) ?? []), spec]);
  }
  const weights = [...bySource].map(([source, specs]): PlannedWeight => {
    const [spec] = specs as [WeightSpec, ...WeightSpec[]];
    const blockScales = findBlockScales(spec, source, checkpoint);
    const stored = blockScales ? undefined : findStored(spec, source, checkpoint);
    if (!stored) for (const each of specs) checkTensor(each, source, blockScales !== undefined);
    const encoding = stored?.encoding ?? encodingOf(specs, options.encoding);
    return { source, specs, encoding, stored, blockScales, deviceBytes: weightBytes(spec, encoding) };
  });
  checkStacks(weights);
  const sources = weights.flatMap(({ source, stored, blockScales }) => [
    source,
    ...(stored ? companionsOf(stored) : []),
    ...(blockScales ? [blockScales] : []),
  ]);
  const buffers = planBuffers(
    modules.flatMap((module) => module.temporaries),
    config,
    maxTokens,
    pages,
  );

  const totalWeights = sum(weights.map(({ deviceBytes }) => deviceBytes));
  const totalBuffers = sum(buffers.map(({ deviceBytes }) => deviceBytes));
  return {
    options,
    maxTokens,
    pages,
    weights,
    buffers,
    sources,
    readBytes: sum(sources.map(({ begin, end }) => end - begin)),
    weightBytes: totalWeights,
    bufferBytes: totalBuffers,
    deviceBytes: totalWeights + totalBuffers,
    largestBytes: [...weights, ...buffers].reduce((most, { deviceBytes }) => Math.max(most, deviceBytes), 0),
  };
}

/** Bytes of weights that the pass of one token reads: all, but for tables of which it takes a row, and experts of which it takes some. */
export const weightBytesPerToken = ({ weights }: LoadPlan): number =>
  Math.round(
    sum(
      weights
        .filter(({ specs }) => !specs.every(({ gathered }) => gathered))
        .map(({ deviceBytes, specs: [spec] }) =>
          spec?.stack ? (deviceBytes * spec.stack.chosen) / spec.stack.experts : deviceBytes,
        ),
    ),
  );

/** A tied matrix is also the embedding, which stays as it is; experts lie one behind the other, so their blocks have to be whole. */
function encodingOf(specs: readonly WeightSpec[], wanted: Encoding): Encoding {
  if (!specs.every(({ quantizable, isQuantizedAtLoad = true }) => quantizable && isQuantizedAtLoad)) return "bf16";
  const fits = specs.every((spec) => !spec.stack || areBlocksWhole(spec, wanted));
  return fits ? wanted : "bf16";
}

const areBlocksWhole = ({ rows, columns }: WeightSpec, encoding: Encoding): boolean =>
  encoding === "bf16" || encoding === "int8" || (rows * columns) % NF4_BLOCK === 0;

/** The experts of a layer lie in one tensor. */
function checkStacks(weights: readonly PlannedWeight[]): void {
  const first = new Map<string, PlannedWeight>();
  for (const weight of weights) {
    const [spec] = weight.specs;
    if (!spec?.stack) continue;
    const other = first.get(spec.stack.name) ?? weight;
    first.set(spec.stack.name, other);
    const problem =
      weight.encoding !== other.encoding
        ? `is ${weight.encoding}, and ${other.source.name} is ${other.encoding}`
        : areBlocksWhole(spec, weight.encoding)
          ? undefined
          : `has ${spec.rows * spec.columns} values in blocks of ${NF4_BLOCK}`;
    if (problem === undefined) continue;
    throw new UserError(
      "unsupported_model",
      `${weight.source.file.name}: tensor ${weight.source.name} ${problem}; meshnet keeps the experts of a layer together`,
      "use the checkpoint that this one was made of",
    );
  }
}

/** Of an expert its share of the stack: what that is longer by with it. */
function weightBytes(spec: WeightSpec, encoding: Encoding): number {
  const { kind, rows, columns, stack } = spec;
  if (kind === "vector") return tensorBytes(1, columns, "f32");
  if (!stack) return matrixBytes(rows, columns, encoding);
  const upTo = (experts: number) => matrixBytes(rows * experts, columns, encoding);
  return upTo(stack.expert + 1) - upTo(stack.expert);
}

function matrixBytes(rows: number, columns: number, encoding: Encoding): number {
  if (encoding === "bf16") return tensorBytes(rows, columns, "bf16");
  const words = codeWords(columns, encoding);
  return tensorBytes(rows, words, "u32") + tensorBytes(1, scaleCount(rows, columns, encoding), "f32");
}

function findTensor(
  spec: WeightSpec,
  family: Family,
  checkpoint: Checkpoint,
  { span }: StageOptions,
): CheckpointTensor {
  for (const name of spec.names) {
    for (const prefix of family.prefixes) {
      const tensor = checkpoint.tensors.get(prefix + name);
      if (tensor) return tensor;
    }
  }
  // As this checkpoint would name it.
  const names = [...checkpoint.tensors.keys()];
  const prefix = family.prefixes.find((one) => one !== "" && names.some((name) => name.startsWith(one))) ?? "";
  throw new UserError(
    "bad_model",
    `layers ${formatSpan(span)} need the tensor ${spec.names.map((name) => prefix + name).join(" or ")}, and no file of the checkpoint has it`,
    `use a complete ${family.modelType} checkpoint; looked in ${checkpoint.files.map(({ name }) => name).join(", ")}`,
  );
}

function checkTensor(spec: WeightSpec, { name, file, shape, dtype }: CheckpointTensor, hasBlockScales: boolean): void {
  if (dtype !== "F32" && dtype !== "F16" && dtype !== "BF16" && !hasBlockScales) {
    throw new UserError(
      "unsupported_model",
      `${file.name}: tensor ${name} is ${dtype}, and meshnet reads F32, F16, BF16, matrices in FP8 (F8_E4M3), and what bitsandbytes makes of them`,
      "use a checkpoint in one of these types",
    );
  }
  const { kind, rows, columns } = spec;
  const expected = kind === "vector" ? [columns] : spec.storedTransposed ? [columns, rows] : [rows, columns];
  if (shape.length !== expected.length || shape.some((size, i) => size !== expected[i])) {
    throw new UserError(
      "bad_model",
      `${file.name}: tensor ${name} has the shape [${shape.join(", ")}], and config.json says [${expected.join(", ")}]`,
      "use the config.json that belongs to these files",
    );
  }
}

/** What the modules asked for by label, and what every stage has: the tables, the way in and out. */
function planBuffers(
  temporaries: readonly TemporarySpec[],
  { hiddenSize, vocabSize }: ModelConfig,
  maxTokens: number,
  pages: number,
): PlannedBuffer[] {
  const counts = { tokens: maxTokens, slots: pages * PAGE_TOKENS };
  const planned = new Map<string, PlannedBuffer>();
  const plan = (label: string, rows: number, columns: number, type: TemporarySpec["type"], paged = false) => {
    const earlier = planned.get(label);
    if (!earlier)
      planned.set(label, { label, rows, columns, type, paged, deviceBytes: tensorBytes(rows, columns, type) });
    else if (earlier.rows !== rows || earlier.columns !== columns || earlier.type !== type) {
      throw new Error(`two modules want different temporaries called ${label}`);
    }
  };

  const logitRows = logitRowsFor(vocabSize);
  plan("stream", maxTokens, hiddenSize, "f32");
  for (const { label, rows, columns, type } of temporaries)
    plan(label, typeof rows === "number" ? rows : counts[rows], columns, type, rows === "slots");
  plan("tokens", maxTokens, 2, "u32");
  plan("slots", 1, maxTokens, "u32");
  plan("queries", maxTokens, 4, "u32");
  plan("pages", 1, pages, "u32");
  plan("gather_index", 1, MAX_ROWS, "u32");
  plan("gathered", logitRows, hiddenSize, "f32");
  plan("argmax", 1, logitRows, "u32");
  plan(
    "wire",
    1,
    Math.ceil(Math.max(maxTokens * hiddenSize, planned.has("logits") ? logitRows * vocabSize : 0) / 2),
    "u32",
  );
  plan("upload", 1, UPLOAD_BYTES / 4, "u32");
  plan("nothing", 1, 4, "f32");
  return [...planned.values()];
}
