import type { Heads } from "./attention.ts";
import { roundBf16 } from "./bf16.ts";
import type { Matrix } from "./matrix.ts";

export interface HeadShape {
  heads: number;
  kvHeads: number;
  headDim: number;
}

/** What the cache keeps of rows that hold all queries, then all keys, then all values: in bfloat16. */
export function kvWrite(qkv: Matrix, { heads, kvHeads, headDim }: HeadShape): { keys: Heads; values: Heads } {
  const headsFrom = (firstColumn: number) =>
    qkv.map((row) =>
      Array.from({ length: kvHeads }, (_, head) =>
        Array.from({ length: headDim }, (__, dim) => roundBf16(row[firstColumn + head * headDim + dim]!)),
      ),
    );
  return { keys: headsFrom(heads * headDim), values: headsFrom((heads + kvHeads) * headDim) };
}
