import type { Matrix } from "./matrix.ts";

export interface LatentShape {
  heads: number;
  plain: number;
  turned: number;
  value: number;
}

/**
 * q [tokens, heads (plain + turned)] to [tokens, heads (latent + turned)]: each head's plain part times the rows of its keys,
 * row after row in float32, and its turned part behind it. weight: [heads (plain + value), latent]
 */
export const absorbQuery = (q: Matrix, weight: Matrix, { heads, plain, turned, value }: LatentShape): number[][] =>
  q.map((row) =>
    Array.from({ length: heads }, (_, head) => {
      const query = Array.from(row).slice(head * (plain + turned), (head + 1) * (plain + turned));
      const keyRows = Array.from({ length: plain }, (__, d) => weight[head * (plain + value) + d]!);
      const absorbed = Array.from(weight[0]!, (__, c) => addInOrder(keyRows.map((key, d) => query[d]! * key[c]!)));
      return [...absorbed, ...query.slice(plain)];
    }).flat(),
  );

/** x [tokens, heads (latent + turned)] to [tokens, heads value]: each head's latent part times the rows of its values. */
export const expandValue = (x: Matrix, weight: Matrix, { heads, plain, turned, value }: LatentShape): number[][] =>
  x.map((row) =>
    Array.from({ length: heads * value }, (_, i) => {
      const head = Math.floor(i / value);
      const first = head * (weight[0]!.length + turned);
      const valueRow = Array.from(weight[head * (plain + value) + plain + (i % value)]!);
      return addInOrder(valueRow.map((factor, c) => factor * row[first + c]!));
    }),
  );

const addInOrder = (terms: readonly number[]): number => terms.reduce((sum, term) => Math.fround(sum + term), 0);
