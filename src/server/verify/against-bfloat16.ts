import { sum } from "../../base/bytes.ts";
import { UserError } from "../../base/errors.ts";
import { formatSpan, type Span } from "../../base/span.ts";
import type { StageInput } from "../../engine/types.ts";
import { bf16ArrayToF32, indexOfNonFinite } from "../../quant/bf16.ts";
import type { LoadPlan, PlannedWeight } from "../../weights/plan.ts";
import { LogitComparison, type LogitQuality, outsideBounds } from "../logit-quality.ts";
import { BOUNDS, type Compared, type EncodingName } from "./encodings.ts";
import type { EncodingReport, Verification } from "./report.ts";
import { firstDifference, forwardAll, idsInput, type Stages } from "./stages.ts";

export interface TextToRun {
  readonly sequences: readonly Int32Array[];
  readonly layers: number;
  readonly vocabSize: number;
  /** The layer at which the model is cut; null where it has only one. */
  readonly cut: number | null;
}

/** Runs a text through bfloat16 and one encoding after another, and compares. */
export async function compareWithBfloat16(
  stages: Stages,
  text: TextToRun,
  compared: readonly Compared[],
): Promise<Pick<Verification, "encodings" | "problems">> {
  const problems: string[] = [];
  const encodings: EncodingReport[] = [];
  const reference = await run(stages, text, "bfloat16");
  problems.push(...reference.problems);
  if (reference.overflows) return { encodings, problems };
  if (saysNothing(reference.logits, text.vocabSize)) {
    problems.push("bfloat16: all logits of a token are equal, for every token: there is nothing to compare with");
    return { encodings, problems };
  }
  const { perplexity } = qualityOf(reference.logits, reference.logits, text);
  encodings.push({ ...reference.report, perplexity, quality: null, bounds: null });

  for (const encoding of compared) {
    try {
      const candidate = await run(stages, text, encoding);
      problems.push(...candidate.problems);
      if (candidate.overflows) continue;
      const quality = qualityOf(reference.logits, candidate.logits, text);
      const bounds = BOUNDS[encoding];
      encodings.push({ ...candidate.report, perplexity: quality.perplexity, quality, bounds });
      problems.push(...outsideBounds(quality, bounds).map((what) => `${encoding}: ${what}`));
    } catch (error) {
      problems.push(asFinding(error, encoding));
    }
  }
  return { encodings, problems };
}

/** Whether no token of the vocabulary is ever likelier than another: a norm of zeros gives that, say. */
const saysNothing = (logits: readonly Uint16Array[], vocabSize: number): boolean =>
  logits.every((values) => values.every((value, i) => value === values[i - (i % vocabSize)]));

/** A weight that has no code in an encoding is a finding; anything else keeps verify from running. */
export function asFinding(error: unknown, encoding: Compared): string {
  if (error instanceof UserError && error.code === "bad_model") return `${encoding}: ${error.message}`;
  throw error;
}

interface Run {
  /** [tokens, vocabSize] bfloat16 of each sequence. */
  readonly logits: readonly Uint16Array[];
  readonly report: Pick<EncodingReport, "name" | "bytesPerParameter" | "sameTwice" | "sameCut">;
  readonly problems: readonly string[];
  /** Whether a logit is no number. */
  readonly overflows: boolean;
}

async function run(stages: Stages, text: TextToRun, encoding: EncodingName): Promise<Run> {
  const { layers, cut } = text;
  const problems: string[] = [];
  const ids = text.sequences.map(idsInput);
  const { logits, again, bytesPerParameter } = await stages.use(encoding, [0, layers], async (stage, load) => ({
    logits: await forwardAll(stage, ids, "all_logits"),
    again: await forwardAll(stage, ids, "all_logits"),
    bytesPerParameter: bytesPerParameterOf(load),
  }));
  const overflows = logits.some((values) => indexOfNonFinite(values) >= 0);
  if (overflows) problems.push(await findOverflow(stages, text, encoding, logits));
  const difference = firstDifference(logits, again);
  if (difference) problems.push(`${encoding}: a second run gave other bits, first in ${nameOf(difference)}`);

  let cutDifference: ReturnType<typeof firstDifference>;
  if (cut !== null) {
    cutDifference = firstDifference(logits, await runCut(stages, text, encoding, cut, ids));
    if (cutDifference) {
      problems.push(`${encoding}: cut at layer ${cut} the model gave other bits, first in ${nameOf(cutDifference)}`);
    }
  }
  const sameCut = cut === null ? null : !cutDifference;
  const report = { name: encoding, bytesPerParameter, sameTwice: !difference, sameCut };
  return { logits, report, problems, overflows };
}

const nameOf = ({ sequence, element }: { sequence: number; element: number }): string =>
  `logit ${element} of sequence ${sequence}`;

async function runCut(
  stages: Stages,
  { layers }: TextToRun,
  encoding: EncodingName,
  cut: number,
  ids: readonly StageInput[],
): Promise<Uint16Array[]> {
  const hidden = await stages.use(encoding, [0, cut], (stage) => forwardAll(stage, ids, "hidden"));
  const inputs = hidden.map((values, at) => ({ kind: "hidden" as const, rows: ids[at]!.rows, hidden: values }));
  return stages.use(encoding, [cut, layers], (stage) => forwardAll(stage, inputs, "all_logits"));
}

/** The first layer whose output is not finite: what is broken once stays so. */
async function findOverflow(
  stages: Stages,
  { sequences, layers }: TextToRun,
  encoding: EncodingName,
  logits: readonly Uint16Array[],
): Promise<string> {
  const sequence = logits.findIndex((values) => indexOfNonFinite(values) >= 0);
  const input = [idsInput(sequences[sequence]!)];
  let [fine, bad] = [0, layers];
  while (bad - fine > 1) {
    const end = Math.floor((fine + bad) / 2);
    const [hidden] = await stages.use(encoding, [0, end], (stage) => forwardAll(stage, input, "hidden"));
    if (indexOfNonFinite(hidden!) >= 0) bad = end;
    else fine = end;
  }
  const span: Span = { start: fine, end: bad, total: layers };
  const at = bad === layers ? " or behind it" : "";
  return `${encoding}: logits of sequence ${sequence} are NaN or infinite: the activations overflow in layers ${formatSpan(span)}${at}, whose weights are all finite`;
}

function qualityOf(
  reference: readonly Uint16Array[],
  candidate: readonly Uint16Array[],
  { sequences, vocabSize }: TextToRun,
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

export const valuesOf = ({ specs }: PlannedWeight): number => specs[0]!.rows * specs[0]!.columns;

function bytesPerParameterOf({ weights }: LoadPlan): EncodingReport["bytesPerParameter"] {
  const quantizable = weights.filter(({ specs }) => specs.every((spec) => spec.quantizable));
  const ratio = (some: readonly PlannedWeight[]) =>
    sum(some.map(({ deviceBytes }) => deviceBytes)) / sum(some.map(valuesOf));
  return { quantized: ratio(quantizable), model: ratio(weights) };
}
