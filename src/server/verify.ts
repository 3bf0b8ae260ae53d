import { readFileSync } from "node:fs";
import { sum } from "../base/bytes.ts";
import { messageOf, UserError } from "../base/errors.ts";
import { silentLogger } from "../base/log.ts";
import { formatSpan, type Span } from "../base/span.ts";
import { openStage } from "../engine/open-stage.ts";
import type { GpuStage } from "../engine/stage.ts";
import type { StageInput, Want } from "../engine/types.ts";
import { type Device, openDevice } from "../gpu/device.ts";
import { silentProgress } from "../hub/progress.ts";
import { bf16ArrayToF32, convertToBf16, type FloatDtype, indexOfNonFinite } from "../quant/bf16.ts";
import { RangeReader } from "../safetensors/range-reader.ts";
import { loadTokenizer, type Tokenizer } from "../tokenizer/tokenizer.ts";
import type { LoadPlan, PlannedWeight } from "../weights/plan.ts";
import { fetchWeights } from "./fetch.ts";
import { LogitComparison, type LogitQuality, outsideBounds, type QualityBounds } from "./logit-quality.ts";
import { type NodeConfig, type NodePlan, planNode, type Surroundings } from "./plan-node.ts";
import { VERIFY_TEXT } from "./verify-text.ts";

export type { JudgedQuality, LogitQuality, QualityBounds } from "./logit-quality.ts";

/** What bfloat16 is compared with, by the flags of a node. */
const COMPARED = {
  int8: { quantization: "int8" },
  "int8-activations": { quantization: "int8", int8Activations: true },
  nf4: { quantization: "nf4" },
} as const satisfies Record<string, Pick<NodeConfig, "quantization" | "int8Activations">>;
export type Compared = keyof typeof COMPARED;
type EncodingName = Compared | "bfloat16";

const flagsOf = (name: EncodingName): Pick<NodeConfig, "quantization" | "int8Activations"> =>
  name === "bfloat16" ? { quantization: name } : COMPARED[name];

export interface VerifyConfig extends Pick<NodeConfig, "modelId" | "revision" | "device" | "offline" | "cacheDir"> {
  readonly compared: readonly Compared[];
  /** A file; default: the built-in text. */
  readonly text?: string;
  /** Tokens of a sequence; default: 256, or what the model has. */
  readonly maxContext?: number;
}

/** The answer of `meshnet verify --json`, as docs/verify.md describes it. */
export interface Verification {
  readonly schema: 1;
  readonly model: {
    readonly id: string;
    readonly revision: string;
    readonly type: string;
    readonly layers: number;
    readonly parameters: number;
  };
  readonly device: { readonly name: string; readonly driver: string };
  readonly text: {
    readonly source: string;
    readonly tokens: number;
    readonly sequences: number;
    /** Tokens that follow another one, and are predicted. */
    readonly predicted: number;
  };
  /** The layer at which the model was cut; null where it has only one. */
  readonly cut: number | null;
  /** bfloat16, then what is compared with it; nothing where the checkpoint itself is broken. */
  readonly encodings: readonly EncodingReport[];
  readonly problems: readonly string[];
  readonly ok: boolean;
}

export interface EncodingReport {
  readonly name: EncodingName;
  readonly bytesPerParameter: {
    /** Of the weights that bitsandbytes would quantize, scales included. */
    readonly quantized: number;
    readonly model: number;
  };
  readonly perplexity: number;
  /** Against bfloat16, and what it is judged by; null for bfloat16 itself. */
  readonly quality: LogitQuality | null;
  readonly bounds: QualityBounds | null;
  /** Whether a second run gave the same bits. */
  readonly sameTwice: boolean;
  /** Whether the model, cut in two, gave the same bits; null where it cannot be cut. */
  readonly sameCut: boolean | null;
}

/**
 * What an encoding may cost. Between what right encodings measure with gpt2-tiny, a small model that takes them badly
 * (relative rms and KL: int8 0.015 and 0.002, nf4 0.19 and 0.25), and what wrong ones do (scales of the next row or block:
 * int8 0.47 and 1.4, nf4 0.47 and 0.87), so that a model which takes an encoding worse than most is not called broken. See
 * docs/verify.md.
 */
export const BOUNDS: Readonly<Record<Compared, QualityBounds>> = {
  int8: { relativeRms: 0.1, klDivergence: 0.05, sureAgreement: 0.95, perplexityRatio: 1.1 },
  "int8-activations": { relativeRms: 0.1, klDivergence: 0.05, sureAgreement: 0.95, perplexityRatio: 1.1 },
  nf4: { relativeRms: 0.4, klDivergence: 0.5, sureAgreement: 0.7, perplexityRatio: 1.5 },
};

/** Long enough for attention to matter, short enough for any device. */
const DEFAULT_CONTEXT = 256;
/** Logits of bfloat16 are kept on the host while the encodings run: a longer text is cut. */
const MAX_LOGIT_BYTES = 2 ** 29;

/**
 * Runs a model over a text in bfloat16 and in each encoding, one stage at a time on the device, and compares.
 * @throws UserError for what keeps it from running; what it finds is in the result's `problems`.
 */
export async function verify(config: VerifyConfig, surroundings: Surroundings): Promise<Verification> {
  const { log, progress = silentProgress } = surroundings;
  const node = { shardStart: 0, host: "", port: 0, allowedHosts: [], allowedOrigins: [], ...config, text: undefined };
  const whole = await planNode(node, surroundings);
  using snapshot = whole.snapshot;
  if (whole.quantization !== "bfloat16") throw quantizedAlready(snapshot.modelId, whole.quantization);
  const { vocabSize, maxPositions, modelType, layers } = whole.config;
  const maxContext = config.maxContext ?? Math.min(maxPositions, DEFAULT_CONTEXT);
  const sequences = sequencesOf(await tokenizerOf(snapshot.directory), readText(config.text), maxContext, vocabSize);
  await fetchWeights(snapshot, whole.fetch, progress);
  const cut = layers < 2 ? null : Math.floor(layers / 2);
  const result = {
    schema: 1 as const,
    model: {
      id: snapshot.modelId,
      revision: snapshot.revision,
      type: modelType,
      layers,
      parameters: sum(whole.load.weights.map(valuesOf)),
    },
    text: {
      source: config.text ?? "built-in",
      tokens: sum(sequences.map((ids) => ids.length)),
      sequences: sequences.length,
      predicted: sum(sequences.map((ids) => ids.length - 1)),
    },
    cut,
  };
  log.info("verify", { text: result.text.source, tokens: result.text.tokens, sequences: sequences.length });

  /** Everything is on this machine by now. */
  const planOf: Planner = (encoding, start, end) =>
    planNode(
      {
        ...node,
        ...flagsOf(encoding),
        maxContext,
        maxSessions: 1,
        shardStart: start,
        shardEnd: end,
        offline: true,
        revision: snapshot.revision,
      },
      { ...surroundings, log: silentLogger },
    );
  using plan = disposable(await planOf("bfloat16", 0, layers));
  const { largestBytes } = plan.load;
  const device = await openDevice({
    select: config.device,
    log,
    wanted: { bufferBytes: largestBytes, bindingBytes: largestBytes },
  });
  const { name, description: driver } = device.info;
  try {
    const broken = brokenWeights(plan.load);
    const runner = new Runner(device, planOf, sequences, layers, cut, surroundings);
    const { encodings, problems } =
      broken.length > 0 ? { encodings: [], problems: broken } : await compareAll(runner, config.compared, vocabSize);
    return { ...result, device: { name, driver }, encodings, problems, ok: problems.length === 0 };
  } finally {
    device.destroy();
  }
}

type Planner = (encoding: EncodingName, start: number, end: number) => Promise<NodePlan>;

async function compareAll(runner: Runner, compared: readonly Compared[], vocabSize: number) {
  const problems: string[] = [];
  const encodings: EncodingReport[] = [];
  const reference = await runner.run("bfloat16");
  problems.push(...reference.problems);
  if (reference.overflows) return { encodings, problems };
  const perplexity = qualityOf(reference.logits, reference.logits, runner.sequences, vocabSize).perplexity;
  encodings.push({ ...reference.report, perplexity, quality: null, bounds: null });

  for (const encoding of compared) {
    try {
      const run = await runner.run(encoding);
      problems.push(...run.problems);
      if (run.overflows) continue;
      const quality = qualityOf(reference.logits, run.logits, runner.sequences, vocabSize);
      const bounds = BOUNDS[encoding];
      encodings.push({ ...run.report, perplexity: quality.perplexity, quality, bounds });
      problems.push(...outsideBounds(quality, bounds).map((what) => `${encoding}: ${what}`));
    } catch (error) {
      // A weight that has no code in this encoding is a finding; anything else keeps verify from running.
      if (!(error instanceof UserError) || error.code !== "bad_model") throw error;
      problems.push(`${encoding}: ${error.message}`);
    }
  }
  return { encodings, problems };
}

interface Run {
  /** [tokens, vocabSize] bfloat16 of each sequence. */
  readonly logits: readonly Uint16Array[];
  readonly report: Pick<EncodingReport, "name" | "bytesPerParameter" | "sameTwice" | "sameCut">;
  readonly problems: readonly string[];
  /** Whether a logit is no number. */
  readonly overflows: boolean;
}

/** Runs the text through stages of one encoding after another. */
class Runner {
  constructor(
    private readonly device: Device,
    private readonly planOf: Planner,
    readonly sequences: readonly Int32Array[],
    private readonly layers: number,
    private readonly cut: number | null,
    private readonly surroundings: Surroundings,
  ) {}

  async run(encoding: EncodingName): Promise<Run> {
    const { layers } = this;
    const problems: string[] = [];
    const ids = this.sequences.map(idsInput);
    const { logits, again, bytesPerParameter } = await this.#onStage(encoding, 0, layers, async (stage, load) => ({
      logits: await forwardAll(stage, ids, "all_logits"),
      again: await forwardAll(stage, ids, "all_logits"),
      bytesPerParameter: bytesPerParameterOf(load),
    }));
    const overflows = logits.some((values) => indexOfNonFinite(values) >= 0);
    if (overflows) problems.push(await this.#findOverflow(encoding, logits));
    const difference = firstDifference(logits, again);
    if (difference) problems.push(`${encoding}: a second run gave other bits, first in ${difference}`);

    let cutDifference: string | undefined;
    if (this.cut !== null) {
      cutDifference = firstDifference(logits, await this.#runCut(encoding, this.cut, ids));
      if (cutDifference) {
        problems.push(`${encoding}: cut at layer ${this.cut} the model gave other bits, first in ${cutDifference}`);
      }
    }
    const sameCut = this.cut === null ? null : !cutDifference;
    const report = { name: encoding, bytesPerParameter, sameTwice: !difference, sameCut };
    return { logits, report, problems, overflows };
  }

  async #runCut(encoding: EncodingName, cut: number, ids: readonly StageInput[]) {
    const hidden = await this.#onStage(encoding, 0, cut, (stage) => forwardAll(stage, ids, "hidden"));
    const inputs = hidden.map((values, at) => ({ kind: "hidden" as const, rows: ids[at]!.rows, hidden: values }));
    return this.#onStage(encoding, cut, this.layers, (stage) => forwardAll(stage, inputs, "all_logits"));
  }

  /** The first layer whose output is not finite: what is broken once stays so. */
  async #findOverflow(encoding: EncodingName, logits: readonly Uint16Array[]): Promise<string> {
    const sequence = logits.findIndex((values) => indexOfNonFinite(values) >= 0);
    const input = [idsInput(this.sequences[sequence]!)];
    const { layers } = this;
    let [fine, bad] = [0, layers];
    while (bad - fine > 1) {
      const end = Math.floor((fine + bad) / 2);
      const [hidden] = await this.#onStage(encoding, 0, end, (stage) => forwardAll(stage, input, "hidden"));
      if (indexOfNonFinite(hidden!) >= 0) bad = end;
      else fine = end;
    }
    const span: Span = { start: fine, end: bad, total: layers };
    const at = bad === layers ? " or behind it" : "";
    return `${encoding}: logits of sequence ${sequence} are NaN or infinite: the activations overflow in layers ${formatSpan(span)}${at}, whose weights are all finite`;
  }

  /** One stage at a time: its memory is given back before the next one asks for it. */
  async #onStage<T>(
    encoding: EncodingName,
    start: number,
    end: number,
    use: (stage: GpuStage, load: LoadPlan) => Promise<T>,
  ): Promise<T> {
    const { device } = this;
    using plan = disposable(await this.planOf(encoding, start, end));
    const { span } = plan.load.options;
    this.surroundings.log.info("running", { encoding, layers: `${formatSpan(span)} of ${span.total}` });
    const stage = await openStage({ ...plan, plan: plan.load, device });
    try {
      return await use(stage, plan.load);
    } finally {
      stage.destroy();
      await device.reclaim();
    }
  }
}

const disposable = (plan: NodePlan): NodePlan & Disposable => ({
  ...plan,
  [Symbol.dispose]: () => plan.snapshot[Symbol.dispose](),
});

const idsInput = (ids: Int32Array): StageInput => ({
  kind: "ids",
  rows: [{ tokens: ids.length, positionStart: 0 }],
  ids,
});

async function forwardAll(stage: GpuStage, inputs: readonly StageInput[], want: Want): Promise<Uint16Array[]> {
  const outputs: Uint16Array[] = [];
  for (const input of inputs) {
    const output = await stage.forward(input, want);
    if (!("values" in output)) throw new Error(`a stage gave ${output.kind} for ${want}`);
    outputs.push(output.values);
  }
  return outputs;
}

/** The whole of each sequence bit by bit. */
function firstDifference(expected: readonly Uint16Array[], values: readonly Uint16Array[]): string | undefined {
  for (const [sequence, bits] of expected.entries()) {
    const other = values[sequence]!;
    const at = bits.findIndex((value, index) => value !== other[index]);
    if (at >= 0) return `logit ${at} of sequence ${sequence}`;
  }
  return undefined;
}

function qualityOf(
  reference: readonly Uint16Array[],
  candidate: readonly Uint16Array[],
  sequences: readonly Int32Array[],
  vocabSize: number,
): LogitQuality {
  const comparison = new LogitComparison();
  for (const [sequence, ids] of sequences.entries()) {
    for (let token = 0; token < ids.length; token++) {
      const rowOf = (logits: readonly Uint16Array[]) =>
        bf16ArrayToF32(logits[sequence]!.subarray(token * vocabSize, (token + 1) * vocabSize));
      comparison.add(rowOf(reference), rowOf(candidate), ids[token + 1]);
    }
  }
  return comparison.quality;
}

const valuesOf = ({ specs }: PlannedWeight): number => specs[0]!.rows * specs[0]!.columns;

function bytesPerParameterOf({ weights }: LoadPlan): EncodingReport["bytesPerParameter"] {
  const quantizable = weights.filter(({ specs }) => specs.every((spec) => spec.quantizable));
  const ratio = (some: readonly PlannedWeight[]) =>
    sum(some.map(({ deviceBytes }) => deviceBytes)) / sum(some.map(valuesOf));
  return { quantized: ratio(quantizable), model: ratio(weights) };
}

const quantizedAlready = (modelId: string, quantization: string): UserError =>
  new UserError(
    "unsupported_model",
    `verify compares encodings with bfloat16, and the weights of ${modelId} are quantized already, as ${quantization}`,
    "verify the checkpoint that it was made of",
  );

/** Values that are read at a time. */
const SCAN_VALUES = 2 ** 18;

/** Every weight that holds NaN or infinity, or what is infinite as bfloat16: a kernel may make anything of it. */
function brokenWeights({ weights }: LoadPlan): string[] {
  using reader = new RangeReader();
  const problems: string[] = [];
  const values = new Uint16Array(SCAN_VALUES);
  for (const { source } of weights) {
    const bytes = source.dtype === "F32" ? 4 : 2;
    const count = (source.end - source.begin) / bytes;
    for (let first = 0; first < count; first += SCAN_VALUES) {
      const some = values.subarray(0, Math.min(SCAN_VALUES, count - first));
      const raw = new Uint8Array(some.length * bytes);
      reader.read(source.file, source.begin + first * bytes, raw);
      convertToBf16(source.dtype as FloatDtype, raw, some);
      const at = indexOfNonFinite(some);
      if (at < 0) continue;
      const [value] = bf16ArrayToF32(some.subarray(at, at + 1));
      problems.push(`${source.file.name}: tensor ${source.name} holds ${value} as bfloat16, at element ${first + at}`);
      break;
    }
  }
  return problems;
}

async function tokenizerOf(directory: string): Promise<Tokenizer> {
  try {
    return await loadTokenizer(directory);
  } catch (cause) {
    if (!(cause instanceof UserError)) throw cause;
    throw new UserError(
      cause.code,
      `verify reads a text and needs the model's tokenizer: ${cause.message}`,
      cause.hint,
      { cause },
    );
  }
}

function readText(file: string | undefined): string {
  if (file === undefined) return VERIFY_TEXT;
  try {
    return readFileSync(file, "utf8");
  } catch (cause) {
    throw new UserError(
      "bad_usage",
      `--text ${file} cannot be read: ${messageOf(cause)}`,
      "give a file of plain text",
      {
        cause,
      },
    );
  }
}

/** Sequences of at most a context's tokens, each of at least two: one that is predicted. */
function sequencesOf(tokenizer: Tokenizer, text: string, maxContext: number, vocabSize: number): Int32Array[] {
  const ids = tokenizer.encode(text).slice(0, Math.floor(MAX_LOGIT_BYTES / (vocabSize * 2)));
  const sequences: Int32Array[] = [];
  for (let first = 0; first + 1 < ids.length; first += maxContext) {
    sequences.push(Int32Array.from(ids.slice(first, first + maxContext)));
  }
  if (sequences.length > 0) return sequences;
  throw new UserError(
    "bad_usage",
    `the text has ${ids.length} tokens, and verify needs two at least`,
    "give more text: a few hundred tokens make the figures mean something",
  );
}
