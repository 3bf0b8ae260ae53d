import { readFileSync } from "node:fs";
import { join } from "node:path";
import { bf16ArrayToF32 } from "../../src/quant/bf16.ts";
import { readHeader } from "../../src/safetensors/header.ts";

export const FIXTURES = join(import.meta.dir, "../fixtures");
export const TINY = join(FIXTURES, "gpt2-tiny");
export const variant = (name: string): string => join(FIXTURES, "gpt2-variants", name);

export type Run = "fp32" | "bf16_eager" | "bf16_sdpa";

/** What transformers computed for one checkpoint: see `test/fixtures/README.md` for the names. */
export class Oracle {
  readonly #bytes: Buffer;
  readonly #entries: ReturnType<typeof readHeader>;

  constructor(directory: string, file = "oracle.safetensors") {
    const path = join(directory, file);
    this.#bytes = readFileSync(path);
    this.#entries = readHeader(path);
  }

  has(name: string): boolean {
    return this.#entries.has(name);
  }

  shape(name: string): readonly number[] {
    return this.#entry(name).shape;
  }

  ints(name: string): Int32Array {
    const { begin, end } = this.#entry(name);
    return new Int32Array(Uint8Array.from(this.#bytes.subarray(begin, end)).buffer);
  }

  floats(name: string): Float32Array {
    const { dtype, begin, end } = this.#entry(name);
    const { buffer } = Uint8Array.from(this.#bytes.subarray(begin, end));
    return dtype === "BF16" ? bf16ArrayToF32(new Uint16Array(buffer)) : new Float32Array(buffer);
  }

  #entry(name: string) {
    const entry = this.#entries.get(name);
    if (!entry) throw new Error(`the oracle has no ${name}`);
    return entry;
  }
}

/** Root mean square of a - b. */
export function rmsDistance(a: Float32Array, b: Float32Array): number {
  if (a.length !== b.length || a.length === 0) throw new Error(`${a.length} values against ${b.length}`);
  let squares = 0;
  for (let i = 0; i < a.length; i++) squares += (a[i]! - b[i]!) ** 2;
  return Math.sqrt(squares / a.length);
}
