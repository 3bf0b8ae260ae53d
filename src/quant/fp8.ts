import { f32ArrayToBf16 } from "./bf16.ts";

// FP8 in blocks, as DeepSeek-V3 is published: a value is that of its code times the factor of its block of 128 × 128,
// multiplied in float32 (transformers, `integrations/finegrained_fp8.py`).

/** Rows and columns of a block. The last ones of a matrix may be smaller. */
export const FP8_BLOCK = 128;

/** The value of each code of E4M3: a sign, 4 bits of exponent with a bias of 7, 3 of fraction; no infinity, one NaN of each sign. */
export const E4M3: Float32Array = Float32Array.from({ length: 256 }, (_, code) => {
  const exponent = (code >> 3) & 15;
  const fraction = code & 7;
  const magnitude = exponent === 0 ? fraction * 2 ** -9 : (1 + fraction / 8) * 2 ** (exponent - 7);
  const value = exponent === 15 && fraction === 7 ? Number.NaN : magnitude;
  return code >= 128 ? -value : value;
});

/**
 * `codes`: some rows of a matrix [rows, columns], the first of them row `firstRow`. `factors`: of all its blocks, row by row.
 * `target`: as many rows of `stride` values, bfloat16.
 */
export function fp8ToBf16(
  codes: Uint8Array,
  { firstRow, columns, stride }: { firstRow: number; columns: number; stride: number },
  factors: Float32Array,
  target: Uint16Array,
): void {
  const blocksInRow = Math.ceil(columns / FP8_BLOCK);
  const values = new Float32Array(columns);
  for (let row = 0; row * columns < codes.length; row++) {
    const firstFactor = Math.floor((firstRow + row) / FP8_BLOCK) * blocksInRow;
    for (let block = 0; block < blocksInRow; block++) {
      const factor = factors[firstFactor + block]!;
      const end = Math.min((block + 1) * FP8_BLOCK, columns);
      for (let column = block * FP8_BLOCK; column < end; column++) {
        values[column] = E4M3[codes[row * columns + column]!]! * factor;
      }
    }
    f32ArrayToBf16(values, target.subarray(row * stride, row * stride + columns));
  }
}
