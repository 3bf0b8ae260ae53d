import { ceilDiv, sum } from "../base/bytes.ts";
import { DECODE_ROWS, PREFILL_QUERIES } from "../nn/index.ts";
import type { Row } from "./types.ts";

/** The tables that tell the kernels which token is where, in the layout they read. */
export interface PassTables {
  /** [tokens, 2]: id and position. */
  readonly tokens: Uint32Array;
  /** [tokens]: the cache slot of each token. */
  readonly slots: Uint32Array;
  /** [runs, 4]: first token, count, first position, slot of position 0. */
  readonly queries: Uint32Array;
  readonly runs: number;
  readonly isDecode: boolean;
  readonly longestContext: number;
  /** [rows]: the last token of each row. */
  readonly lastTokens: Uint32Array;
}

/**
 * Rows without a session: each sequence begins here, and lies in the cache where its tokens lie in the call.
 * `ids`: [T], or nothing where hidden states come in.
 */
export function tablesOf(rows: readonly Row[], ids?: ArrayLike<number>): PassTables {
  const count = sum(rows.map((row) => row.tokens));
  const tokens = new Uint32Array(count * 2);
  const slots = Uint32Array.from({ length: count }, (_, token) => token);
  const isDecode = rows.length <= DECODE_ROWS && rows.every((row) => row.tokens === 1);
  const queries: number[] = [];
  const lastTokens = new Uint32Array(rows.length);

  let first = 0;
  rows.forEach((row, index) => {
    for (let i = 0; i < row.tokens; i++) {
      tokens[(first + i) * 2] = ids?.[first + i] ?? 0;
      tokens[(first + i) * 2 + 1] = i;
    }
    // Runs begin at multiples of their size, so how a sequence is cut does not depend on its length.
    for (let run = 0; run < ceilDiv(row.tokens, PREFILL_QUERIES); run++) {
      const at = run * PREFILL_QUERIES;
      queries.push(first + at, Math.min(PREFILL_QUERIES, row.tokens - at), at, first);
    }
    first += row.tokens;
    lastTokens[index] = first - 1;
  });

  return {
    tokens,
    slots,
    queries: new Uint32Array(queries),
    runs: queries.length / 4,
    isDecode,
    longestContext: Math.max(...rows.map((row) => row.tokens)),
    lastTokens,
  };
}
