import { roundBf16 } from "./bf16.ts";
import type { Matrix } from "./matrix.ts";

/** The sum of a token's row and its position's row, rounded to bfloat16. */
export const embed = (
  tokens: readonly { id: number; position: number }[],
  tokenTable: Matrix,
  positionTable: Matrix,
): number[][] =>
  tokens.map(({ id, position }) =>
    Array.from(tokenTable[id]!, (value, column) => roundBf16(Math.fround(value + positionTable[position]![column]!))),
  );

/** A token's row times a factor, rounded to bfloat16. */
export const embedTokens = (ids: readonly number[], tokenTable: Matrix, scale: number): number[][] =>
  ids.map((id) => Array.from(tokenTable[id]!, (value) => roundBf16(Math.fround(value * scale))));
