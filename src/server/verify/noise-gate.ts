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

/** Adds up the prompts at one place of the model. */
export class NoiseGate {
  readonly #ours = new Distance();
  readonly #noise = new Distance();
  #worst: Pick<LayerReport, "toFloat32" | "toBfloat16" | "prompt"> | undefined;

  constructor(private readonly name: string) {}

  add(prompt: string, values: Float32Array, { float32, bfloat16 }: Expected): void {
    const noise = distance(bfloat16, float32);
    const ours = distance(values, float32);
    const toFloat32 = ours.rms / noise.rms;
    const toBfloat16 = distance(values, bfloat16).rms / noise.rms;
    this.#ours.add(ours);
    this.#noise.add(noise);
    const worst = this.#worst;
    if (!worst || excess(toFloat32, toBfloat16) > excess(worst.toFloat32, worst.toBfloat16)) {
      this.#worst = { toFloat32, toBfloat16, prompt };
    }
  }

  get report(): LayerReport {
    const worst = this.#worst!;
    return {
      name: this.name,
      rmsError: this.#ours.rms,
      maxError: this.#ours.max,
      noise: this.#noise.rms,
      maxNoise: this.#noise.max,
      ...worst,
      isWithin: excess(worst.toFloat32, worst.toBfloat16) <= 1,
    };
  }
}

/** Above 1: outside the bounds. */
const excess = (toFloat32: number, toBfloat16: number): number =>
  Math.max(toFloat32 / MOST_TO_FLOAT32, toBfloat16 / MOST_TO_BFLOAT16);

class Distance {
  #squares = 0;
  #count = 0;
  max = 0;

  get rms(): number {
    return Math.sqrt(this.#squares / this.#count);
  }

  addValue(difference: number): void {
    this.#squares += difference * difference;
    this.#count++;
    this.max = Math.max(this.max, Math.abs(difference));
  }

  add(other: Distance): void {
    this.#squares += other.#squares;
    this.#count += other.#count;
    this.max = Math.max(this.max, other.max);
  }
}

function distance(a: Float32Array, b: Float32Array): Distance {
  const result = new Distance();
  for (let i = 0; i < a.length; i++) result.addValue(a[i]! - b[i]!);
  return result;
}
