import type { LayerReport } from "./report.ts";

/**
 * How near values must be to what transformers computes, in units of what bfloat16 costs transformers itself (the rms
 * distance of its bfloat16 run to its float32 run). Bit equality is not reachable: transformers does not reach it with
 * itself, with and without a cache, say. What computes as transformers does in bfloat16 is 1 from float32, and what keeps
 * float32 between some steps, as here, is nearer; the rest is room for chance.
 */
export const MOST_TO_FLOAT32 = 1.5;
export const MOST_TO_BFLOAT16 = 2;

/** The two runs of the reference. */
export interface Expected {
  readonly float32: Float32Array;
  readonly bfloat16: Float32Array;
}

/**
 * Adds up the prompts at one place of the model. Differences count as parts of their token's own rms: trained models have
 * tokens, the first one mostly, of which one or two values are thousands of times as large as all others, and the rounding
 * of a single number would decide.
 */
export class NoiseGate {
  readonly #all = new Distances();
  #worst = { excess: -1, prompt: "" };

  constructor(private readonly name: string) {}

  /** `values` and both runs: [tokens, width]. */
  add(prompt: string, tokens: number, values: Float32Array, { float32, bfloat16 }: Expected): void {
    const distances = new Distances();
    const width = values.length / tokens;
    for (let first = 0; first < values.length; first += width) {
      const row = (all: Float32Array) => all.subarray(first, first + width);
      distances.addRow(row(values), row(float32), row(bfloat16));
    }
    this.#all.add(distances);
    const { excess } = distances;
    if (excess > this.#worst.excess) this.#worst = { excess, prompt };
  }

  get report(): LayerReport {
    const { count, ours, noise, apart, maxError, maxNoise, excess } = this.#all;
    return {
      name: this.name,
      relativeRms: Math.sqrt(ours / count),
      relativeNoise: Math.sqrt(noise / count),
      maxError,
      maxNoise,
      toFloat32: Math.sqrt(ours / noise),
      toBfloat16: Math.sqrt(apart / noise),
      prompt: this.#worst.prompt,
      isWithin: excess <= 1,
    };
  }
}

/** Sums of squares, each as a part of its token's mean square; and the largest differences as they are. */
class Distances {
  count = 0;
  /** Between the values and float32. */
  ours = 0;
  /** Between bfloat16 and float32. */
  noise = 0;
  /** Between the values and bfloat16. */
  apart = 0;
  maxError = 0;
  maxNoise = 0;

  /** Above 1: outside the bounds. */
  get excess(): number {
    return Math.sqrt(
      Math.max(this.ours / (this.noise * MOST_TO_FLOAT32 ** 2), this.apart / (this.noise * MOST_TO_BFLOAT16 ** 2)),
    );
  }

  addRow(values: Float32Array, float32: Float32Array, bfloat16: Float32Array): void {
    let [ours, noise, apart, squares] = [0, 0, 0, 0];
    for (let i = 0; i < values.length; i++) {
      const [error, rounding] = [values[i]! - float32[i]!, bfloat16[i]! - float32[i]!];
      ours += error * error;
      noise += rounding * rounding;
      apart += (error - rounding) ** 2;
      squares += float32[i]! ** 2;
      this.maxError = Math.max(this.maxError, Math.abs(error));
      this.maxNoise = Math.max(this.maxNoise, Math.abs(rounding));
    }
    const meanSquare = squares / values.length || 1; // a token of zeros has no size of its own
    this.ours += ours / meanSquare;
    this.noise += noise / meanSquare;
    this.apart += apart / meanSquare;
    this.count += values.length;
  }

  add(other: Distances): void {
    this.count += other.count;
    this.ours += other.ours;
    this.noise += other.noise;
    this.apart += other.apart;
    this.maxError = Math.max(this.maxError, other.maxError);
    this.maxNoise = Math.max(this.maxNoise, other.maxNoise);
  }
}
