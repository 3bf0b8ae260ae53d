import { roundBf16 } from "../../kernels/reference/bf16.ts";
import { matrixOf } from "../../kernels/reference/matrix.ts";

/** Repeatable values, normally distributed about zero. */
export class Sampler {
  readonly #random: () => number;

  constructor(seed: number) {
    this.#random = seededRandom(seed);
  }

  integer = (below: number): number => Math.floor(this.#random() * below);

  normal = (): number => Math.sqrt(-2 * Math.log(1 - this.#random())) * Math.cos(2 * Math.PI * this.#random());

  f32 = (rows: number, columns: number, deviation = 1): number[][] =>
    matrixOf(rows, columns, () => Math.fround(this.normal() * deviation));

  bf16 = (rows: number, columns: number, deviation = 1): number[][] =>
    matrixOf(rows, columns, () => roundBf16(this.normal() * deviation));
}

/** Repeatable numbers from 0 up to below 1 (mulberry32). */
export function seededRandom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
