import { ceilDiv, sum } from "../base/bytes.ts";
import { PAGE_TOKENS, PREFILL_QUERIES } from "../nn/index.ts";

/** Neighbouring tokens of one sequence, and where in the cache the sequence lies. */
export interface TableRow {
  readonly tokens: number;
  readonly positionStart: number;
  /** The sequence's pages from its position 0 to these tokens. */
  readonly pages: readonly number[];
  /** [tokens], where the pass begins with ids */
  readonly ids?: ArrayLike<number>;
}

/** The tables that tell the kernels which token is where, in the layout they read. */
export interface PassTables {
  /** [tokens, 2]: id and position. */
  readonly tokens: Uint32Array;
  /** [tokens]: the cache slot of each token. */
  readonly slots: Uint32Array;
  /** [runs, 4]: first token, count, first position, first entry in `pages`. Runs of one query come first. */
  readonly queries: Uint32Array;
  readonly runs: number;
  readonly singles: number;
  readonly longestSingle: number;
  readonly pages: Uint32Array;
}

export function tablesOf(rows: readonly TableRow[]): PassTables {
  const count = sum(rows.map((row) => row.tokens));
  const tokens = new Uint32Array(count * 2);
  const slots = new Uint32Array(count);
  const singles: number[] = [];
  const runs: number[] = [];
  const pages: number[] = [];
  let longestSingle = 0;

  let first = 0;
  for (const row of rows) {
    for (let i = 0; i < row.tokens; i++) {
      const position = row.positionStart + i;
      tokens[(first + i) * 2] = row.ids?.[i] ?? 0;
      tokens[(first + i) * 2 + 1] = position;
      slots[first + i] = row.pages[Math.floor(position / PAGE_TOKENS)]! * PAGE_TOKENS + (position % PAGE_TOKENS);
    }
    const end = row.positionStart + row.tokens;
    if (row.tokens === 1) {
      singles.push(first, 1, row.positionStart, pages.length);
      longestSingle = Math.max(longestSingle, end);
    } else {
      // Runs begin at multiples of their size, so how a sequence is cut does not depend on where the row begins.
      for (let at = row.positionStart; at < end;) {
        const size = Math.min(PREFILL_QUERIES - (at % PREFILL_QUERIES), end - at);
        runs.push(first + at - row.positionStart, size, at, pages.length);
        at += size;
      }
    }
    for (let page = 0; page < ceilDiv(end, PAGE_TOKENS); page++) pages.push(row.pages[page]!);
    first += row.tokens;
  }

  return {
    tokens,
    slots,
    queries: Uint32Array.from([...singles, ...runs]),
    runs: (singles.length + runs.length) / 4,
    singles: singles.length / 4,
    longestSingle,
    pages: Uint32Array.from(pages),
  };
}
