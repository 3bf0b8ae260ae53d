import { softcap as cap } from "./softcap.ts";

/** [tokens][heads][headDim] */
export type Heads = readonly (readonly ArrayLike<number>[])[];

/** What becomes of q · k: a factor, perhaps a soft cap, and how many keys a query sees, its own included. */
export interface Scoring {
  scale: number;
  softcap?: number;
  window?: number;
}

/**
 * Softmax attention of some tokens of one sequence. The first query stands at `firstPosition`, and each sees the keys
 * from the sequence's first, or the first of its window, to its own.
 */
export function attention(
  queries: Heads,
  keys: Heads,
  values: Heads,
  { scale, softcap, window }: Scoring,
  firstPosition: number,
) {
  const score = (product: number) => (softcap === undefined ? scale * product : cap(scale * product, softcap));
  return queries.map((heads, i) =>
    heads.map((query, head) => {
      const kvHead = kvHeadOf(head, { heads: heads.length, kvHeads: keys[0]!.length });
      const end = firstPosition + i + 1;
      const first = window === undefined ? 0 : Math.max(0, end - window);
      const weights = softmax(keys.slice(first, end).map((key) => score(dot(query, key[kvHead]!))));
      return Array.from(query, (_, dim) =>
        weights.reduce((sum, weight, position) => sum + weight * values[first + position]![kvHead]![dim]!, 0),
      );
    }),
  );
}

/** Query heads share key heads evenly: with 6 and 2, heads 0 to 2 read head 0. */
export const kvHeadOf = (head: number, { heads, kvHeads }: { heads: number; kvHeads: number }): number =>
  Math.floor(head / (heads / kvHeads));

function softmax(scores: readonly number[]): number[] {
  const largest = Math.max(...scores);
  const exponentials = scores.map((score) => Math.exp(score - largest));
  const total = exponentials.reduce((sum, value) => sum + value, 0);
  return exponentials.map((value) => value / total);
}

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i]! * b[i]!;
  return sum;
}
