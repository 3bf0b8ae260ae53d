import { inDigits } from "../../base/digits.ts";
import type { GpuStage } from "../../engine/stage.ts";
import type { StageInput } from "../../engine/types.ts";
import { bf16ArrayToF32, indexOfNonFinite } from "../../quant/bf16.ts";
import { LogitComparison, outsideBounds } from "../logit-quality.ts";
import { asFinding } from "./against-bfloat16.ts";
import { BOUNDS, type Compared, type EncodingName } from "./encodings.ts";
import { MOST_TO_BFLOAT16, MOST_TO_FLOAT32, NoiseGate } from "./noise-gate.ts";
import type { Reference } from "./reference-file.ts";
import type { LayerReport, ReferenceEncoding, ReferenceQuality, ReferenceVerification } from "./report.ts";
import { firstDifference, forwardAll, idsInput, type Stages } from "./stages.ts";

export interface ReferenceRun {
  readonly reference: Reference;
  readonly layers: number;
  readonly vocabSize: number;
}

type Findings = Pick<
  ReferenceVerification,
  "layers" | "firstDiverging" | "referenceQuality" | "encodings" | "problems"
>;

/**
 * Runs a reference's prompts in bfloat16 and in one encoding after another: layer after layer, each as a stage of its own, as
 * if the model were cut everywhere; then as one stage, whole and in pieces.
 */
export async function compareWithReference(
  stages: Stages,
  run: ReferenceRun,
  compared: readonly Compared[],
): Promise<Findings> {
  const problems: string[] = [];
  const layers: LayerReport[] = [];
  const encodings: ReferenceEncoding[] = [];
  for (const encoding of ["bfloat16", ...compared] as const) {
    try {
      const judge = encoding === "bfloat16" ? (report: LayerReport) => void layers.push(report) : undefined;
      const { report, problems: found } = await runEncoding(stages, run, encoding, judge);
      problems.push(...found);
      if (report) encodings.push(report);
      // What bfloat16 does not compute, nothing made of it does.
      else if (encoding === "bfloat16") break;
    } catch (error) {
      if (encoding === "bfloat16") throw error;
      problems.push(asFinding(error, encoding));
    }
  }
  const first = layers.find(({ isWithin }) => !isWithin);
  if (first) problems.unshift(divergence(first));
  const referenceQuality = encodings.length > 0 ? qualityOf(run, ({ bfloat16 }) => bfloat16) : null;
  return { layers, firstDiverging: first?.name ?? null, referenceQuality, encodings, problems };
}

const divergence = ({ name, toFloat32, toBfloat16, prompt }: LayerReport): string =>
  `bfloat16 diverges first at ${name}, most of all in prompt ${prompt}: it is ${inDigits(toFloat32, 3)} times the noise from the reference's float32 (at most ${MOST_TO_FLOAT32}), and ${inDigits(toBfloat16, 3)} times from its bfloat16 (at most ${MOST_TO_BFLOAT16})`;

async function runEncoding(
  stages: Stages,
  run: ReferenceRun,
  encoding: EncodingName,
  judge: ((report: LayerReport) => void) | undefined,
): Promise<{ report?: ReferenceEncoding; problems: string[] }> {
  const { reference, layers } = run;
  const cutEverywhere = await layerByLayer(stages, run, encoding, judge);
  if ("broken" in cutEverywhere) return { problems: [cutEverywhere.broken] };
  const inputs = reference.prompts.map(({ ids }) => idsInput(ids));
  const { whole, pieces } = await stages.use(encoding, [0, layers], async (stage) => ({
    whole: await forwardAll(stage, inputs, "all_logits"),
    pieces: encoding === "int8-activations" ? undefined : await inPieces(stage, reference),
  }));

  const problems: string[] = [];
  const name = ({ sequence, ...rest }: { sequence: number; element: number }) =>
    `logit ${rest.element} of prompt ${reference.prompts[sequence]!.name}`;
  const cuts = firstDifference(whole, cutEverywhere.logits);
  if (cuts) problems.push(`${encoding}: cut after every layer the model gave other bits, first in ${name(cuts)}`);
  const parts = pieces && firstDifference(whole, pieces);
  if (parts) problems.push(`${encoding}: prompts in pieces gave other bits than whole, first in ${name(parts)}`);

  const quality = qualityOf(run, (_, prompt) => bf16ArrayToF32(whole[prompt]!));
  const bounds = encoding === "bfloat16" ? null : boundsOf(encoding);
  if (bounds) {
    // What follows in a prompt was not written by the model: how much it surprises says nothing.
    const outside = outsideBounds({ ...quality, perplexity: 1, perplexityRatio: 1 }, { ...bounds, perplexityRatio: 1 });
    problems.push(...outside.map((what) => `${encoding}: ${what}`));
  }
  const report = {
    name: encoding,
    quality,
    bounds,
    sameCuts: layers < 2 ? null : !cuts,
    samePieces: pieces ? !parts : null,
  };
  return { report, problems };
}

function boundsOf(encoding: Compared): ReferenceEncoding["bounds"] {
  const { perplexityRatio: _, ...bounds } = BOUNDS[encoding];
  return bounds;
}

/** One stage per layer: what leaves it, and at the end the logits of every prompt. */
async function layerByLayer(
  stages: Stages,
  { reference, layers }: ReferenceRun,
  encoding: EncodingName,
  judge: ((report: LayerReport) => void) | undefined,
): Promise<{ logits: Uint16Array[] } | { broken: string }> {
  let inputs = reference.prompts.map(({ ids }) => idsInput(ids));
  for (let layer = 0; ; layer++) {
    const isLast = layer === layers - 1;
    const { hidden, logits } = await stages.use(encoding, [layer, layer + 1], async (stage) => ({
      hidden: await forwardAll(stage, inputs, "hidden"),
      logits: isLast ? await forwardAll(stage, inputs, "all_logits") : undefined,
    }));
    const where = `${encoding} on ${stages.device.info.name}, layers ${layer}-${layer + 1} of ${layers}`;
    const name = isLast ? "final norm" : `layer ${layer}`;
    const broken = findNonFinite(hidden, reference) ?? (logits && findNonFinite(logits, reference));
    if (broken !== undefined) {
      const tensor = findNonFinite(hidden, reference) === undefined ? "the logits" : `the hidden states after ${name}`;
      return { broken: `${where}: ${tensor} hold ${broken}; what the layer was given, and its weights, are finite` };
    }
    judge?.(gate(name, hidden, reference, layer));
    if (logits) {
      judge?.(gate("logits", logits, reference, "logits"));
      return { logits };
    }
    inputs = hidden.map((values, prompt): StageInput => ({
      kind: "hidden",
      rows: inputs[prompt]!.rows,
      hidden: values,
    }));
  }
}

function gate(name: string, values: readonly Uint16Array[], reference: Reference, at: number | "logits"): LayerReport {
  const result = new NoiseGate(name);
  for (const [index, prompt] of reference.prompts.entries()) {
    const expected = reference.expected(prompt.name, at);
    result.add(prompt.name, prompt.ids.length, bf16ArrayToF32(values[index]!), expected);
  }
  return result.report;
}

function findNonFinite(values: readonly Uint16Array[], { prompts }: Reference): string | undefined {
  for (const [index, { name, ids }] of prompts.entries()) {
    const some = values[index]!;
    const at = indexOfNonFinite(some);
    if (at < 0) continue;
    const width = some.length / ids.length;
    const [value] = bf16ArrayToF32(some.subarray(at, at + 1));
    return `${value} for prompt ${name} at token ${Math.floor(at / width)}, value ${at % width}`;
  }
  return undefined;
}

/** Sizes that the kernels for few rows take and sizes that those for many do. */
const PIECES = [3, 1, 30, 2];

async function inPieces(stage: GpuStage, { prompts }: Reference): Promise<Uint16Array[]> {
  const logits: Uint16Array[] = [];
  for (const { ids } of prompts) {
    const all = new Uint16Array(ids.length * stage.info.vocabSize);
    const session = await stage.open({ maxLength: ids.length, stay: "lasting" });
    try {
      for (let start = 0, piece = 0; start < ids.length; piece++) {
        const some = ids.subarray(start, start + PIECES[piece % PIECES.length]!);
        const input = { kind: "ids", ids: some } as const;
        const output = await session.run({ input, positionStart: start, want: "all_logits" });
        if (output.kind !== "all_logits") throw new Error(`a stage gave ${output.kind} for all_logits`);
        all.set(output.values, start * stage.info.vocabSize);
        start += some.length;
      }
    } finally {
      session.close();
    }
    logits.push(all);
  }
  return logits;
}

/** Of logits, which `candidate` gives for a prompt, against the reference's float32 ones. */
function qualityOf(
  { reference, vocabSize }: ReferenceRun,
  candidate: (expected: { bfloat16: Float32Array }, prompt: number) => Float32Array,
): ReferenceQuality {
  const comparison = new LogitComparison();
  for (const [index, { name, ids }] of reference.prompts.entries()) {
    const expected = reference.expected(name, "logits");
    const values = candidate(expected, index);
    for (let token = 0; token < ids.length; token++) {
      const rowOf = (logits: Float32Array) => logits.subarray(token * vocabSize, (token + 1) * vocabSize);
      comparison.add(rowOf(expected.float32), rowOf(values), undefined);
    }
  }
  const { perplexity: _, perplexityRatio: __, ...quality } = comparison.quality;
  return quality;
}
