/** [tokens][heads][headDim] */
export type Heads = readonly (readonly ArrayLike<number>[])[];

/**
 * Softmax attention of some tokens of one sequence. The first query stands at `firstPosition`, and each sees the keys
 * from the sequence's first to its own.
 */
export function attention(queries: Heads, keys: Heads, values: Heads, scale: number, firstPosition: number) {
  return queries.map((heads, i) =>
    heads.map((query, head) => {
      const kvHead = kvHeadOf(head, { heads: heads.length, kvHeads: keys[0]!.length });
      const visible = firstPosition + i + 1;
      const weights = softmax(keys.slice(0, visible).map((key) => scale * dot(query, key[kvHead]!)));
      return Array.from(query, (_, dim) =>
        weights.reduce((sum, weight, position) => sum + weight * values[position]![kvHead]![dim]!, 0),
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
