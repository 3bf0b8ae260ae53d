import { expect } from "bun:test";
import { type Oracle, rmsDistance } from "./oracle.ts";

/**
 * The gate: as near to the float32 oracle as 1.5 times what bfloat16 costs transformers itself, and to its bfloat16
 * run as twice that.
 */
export function expectWithinNoise(oracle: Oracle, values: Float32Array, prompt: string, what: string): void {
  const fp32 = oracle.floats(`${prompt}.fp32.${what}`);
  const bf16 = oracle.floats(`${prompt}.bf16_eager.${what}`);
  const noise = rmsDistance(bf16, fp32);
  const toFp32 = rmsDistance(values, fp32);
  const toBf16 = rmsDistance(values, bf16);
  if (process.env.SHOW)
    console.log(prompt, what, (toFp32 / noise).toFixed(3), (toBf16 / noise).toFixed(3), noise.toFixed(5));
  expect({
    prompt,
    what,
    overFp32: toFp32 > 1.5 * noise,
    overBf16: toBf16 > 2 * noise,
    toFp32,
    toBf16,
    noise,
  }).toMatchObject({
    overFp32: false,
    overBf16: false,
  });
}

/** How many layers the oracle has hidden states of. */
export function layersIn(oracle: Oracle, prompt: string): number {
  let layers = 0;
  while (oracle.has(`${prompt}.fp32.hidden.${layers + 1}`)) layers++;
  return layers;
}
