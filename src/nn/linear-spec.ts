import type { Activations, Pass } from "./pass.ts";

export interface LinearSpec {
  /** Names of the weight, in order of preference. */
  weight: readonly string[];
  bias?: string;
  in: number;
  out: number;
  /** The file keeps the weight as [in, out]. */
  storedTransposed?: boolean;
  /** The temporary that takes the output, and its rows if they are not the pass's tokens. */
  output: string;
  outputRows?: number;
  /** Where it has wider rows than this layer makes: how wide, and the column that the first output goes to. */
  outputColumns?: number;
  outputAt?: number;
  /** Rounds the output to bfloat16. */
  round?: boolean;
  /** Leaves the weight in bfloat16 whatever the encoding of the others: a head's; a router's too, unless its file has it quantized. */
  keepsBf16?: boolean | "unless stored";
  /** The weight is INT8, and so are the activations that it is multiplied by: LLM.int8(). */
  int8Activations?: boolean;
}

export interface Linear {
  /** `x`: [rows, in] to [rows, out], both float32. */
  forward(pass: Pass, x: Activations): Activations;
}

/**
 * Up to this many rows each row reads the weights anew; above, 32 rows share a tile. Both give the same bits, so this
 * is a matter of speed alone.
 */
export const GEMV_ROWS = 8;
