import { inDigits } from "../base/digits.ts";

/** How the logits of one encoding differ from those of bfloat16, over every position of a text. */
export interface LogitQuality {
  /** Of the differences between the logits, as they are. */
  readonly rmsError: number;
  readonly maxError: number;
  /**
   * The rms of the differences over the rms of bfloat16's logits, after each position's mean has been taken off both:
   * what all logits of a position share decides nothing.
   */
  readonly relativeRms: number;
  /** Mean of Σ p · log(p / q), in nats: p is bfloat16's distribution of the next token, q the encoding's. */
  readonly klDivergence: number;
  /** Of the positions, how many have the same most probable token (the lowest id among equals). */
  readonly top1Agreement: number;
  /** The same of the positions at which bfloat16 gives one token half of the probability or more; null without any. */
  readonly sureAgreement: number | null;
  readonly surePositions: number;
  readonly perplexity: number;
  /** The perplexity over that of bfloat16. */
  readonly perplexityRatio: number;
}

/** The most, and of agreement the least, that an encoding may be off. */
export type QualityBounds = Readonly<Record<JudgedQuality, number>>;
export type JudgedQuality = "relativeRms" | "klDivergence" | "sureAgreement" | "perplexityRatio";

/** Fewer say nothing: one of them that is close would decide. */
const LEAST_SURE_POSITIONS = 20;

/** Adds up positions; everything in float64. */
export class LogitComparison {
  #positions = 0;
  #values = 0;
  #squares = 0;
  #maxError = 0;
  #centredSquares = 0;
  #spreadSquares = 0;
  #divergence = 0;
  #agreed = 0;
  #sure = { positions: 0, agreed: 0 };
  #predicted = 0;
  #surprise = { reference: 0, candidate: 0 };

  /** One position: [vocabSize] logits each, and the token that follows in the text, if one does. */
  add(reference: Float32Array, candidate: Float32Array, next: number | undefined): void {
    const [p, q] = [logSoftmax(reference), logSoftmax(candidate)];
    const size = reference.length;
    let [sumReference, sumCandidate] = [0, 0];
    for (let i = 0; i < size; i++) {
      sumReference += reference[i]!;
      sumCandidate += candidate[i]!;
    }
    const [meanReference, meanCandidate] = [sumReference / size, sumCandidate / size];
    for (let i = 0; i < size; i++) {
      const error = candidate[i]! - reference[i]!;
      this.#squares += error * error;
      this.#maxError = Math.max(this.#maxError, Math.abs(error));
      const spread = reference[i]! - meanReference;
      this.#spreadSquares += spread * spread;
      this.#centredSquares += (candidate[i]! - meanCandidate - spread) ** 2;
      this.#divergence += Math.exp(p[i]!) * (p[i]! - q[i]!);
    }
    this.#positions++;
    this.#values += size;
    const best = indexOfLargest(reference);
    const agrees = best === indexOfLargest(candidate) ? 1 : 0;
    this.#agreed += agrees;
    if (Math.exp(p[best]!) >= 0.5) {
      this.#sure.positions++;
      this.#sure.agreed += agrees;
    }
    if (next === undefined) return;
    this.#predicted++;
    this.#surprise.reference -= p[next]!;
    this.#surprise.candidate -= q[next]!;
  }

  get quality(): LogitQuality {
    const perplexity = Math.exp(this.#surprise.candidate / this.#predicted);
    const { positions, agreed } = this.#sure;
    return {
      rmsError: Math.sqrt(this.#squares / this.#values),
      maxError: this.#maxError,
      relativeRms: Math.sqrt(this.#centredSquares / this.#spreadSquares),
      klDivergence: this.#divergence / this.#positions,
      top1Agreement: this.#agreed / this.#positions,
      sureAgreement: positions === 0 ? null : agreed / positions,
      surePositions: positions,
      perplexity,
      perplexityRatio: perplexity / Math.exp(this.#surprise.reference / this.#predicted),
    };
  }
}

/** log(softmax(logits)). */
function logSoftmax(logits: Float32Array): Float64Array {
  const largest = logits[indexOfLargest(logits)]!;
  let total = 0;
  for (let i = 0; i < logits.length; i++) total += Math.exp(logits[i]! - largest);
  const shift = largest + Math.log(total);
  return Float64Array.from(logits, (logit) => logit - shift);
}

function indexOfLargest(values: Float32Array): number {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i]! > values[best]!) best = i;
  return best;
}

/** What of a quality is outside its bounds, in words; nothing where all is within. */
export function outsideBounds(quality: LogitQuality, bounds: QualityBounds): string[] {
  const over = (["relativeRms", "klDivergence", "perplexityRatio"] as const)
    .filter((name) => !(quality[name] <= bounds[name]))
    .map((name) => `${NAMES[name]} is ${inDigits(quality[name], 3)}, above ${bounds[name]}`);
  const { sureAgreement, surePositions } = quality;
  if (sureAgreement === null || surePositions < LEAST_SURE_POSITIONS || sureAgreement >= bounds.sureAgreement)
    return over;
  return [...over, `${NAMES.sureAgreement} is ${inDigits(sureAgreement, 3)}, below ${bounds.sureAgreement}`];
}

const NAMES = {
  relativeRms: "the relative rms error",
  klDivergence: "the KL divergence",
  sureAgreement: "the top-1 agreement where bfloat16 is sure",
  perplexityRatio: "the perplexity over bfloat16's",
};
