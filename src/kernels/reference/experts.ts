import { linearInOrder } from "./linear.ts";
import type { Matrix } from "./matrix.ts";

export interface Routing {
  chosen: number;
  score: "softmax" | "sigmoid";
  bias?: ArrayLike<number>;
  groups?: { count: number; chosen: number; best: 1 | 2 };
  normalize: boolean;
  scale: number;
}

/** The experts of each token, the best first and of equals the lowest number, and what the output of each counts. */
export function route(logits: Matrix, routing: Routing): { choice: number[][]; weights: number[][] } {
  const { chosen, score, bias, normalize, scale } = routing;
  const rows = logits.map((row) => {
    const scores = score === "sigmoid" ? Array.from(row, (x) => 1 / (1 + Math.exp(-x))) : softmax(Array.from(row));
    const ranks = scores.map((value, expert) => value + (bias?.[expert] ?? 0));
    const allowed = membersOfBestGroups(ranks, routing.groups);
    const choice = best(ranks, allowed, chosen);
    const sum = choice.reduce((total, expert) => total + scores[expert]!, 0);
    return { choice, weights: choice.map((expert) => (scores[expert]! / (normalize ? sum : 1)) * scale) };
  });
  return { choice: rows.map(({ choice }) => choice), weights: rows.map(({ weights }) => weights) };
}

function membersOfBestGroups(ranks: readonly number[], groups: Routing["groups"]): number[] {
  const all = ranks.map((_, expert) => expert);
  if (!groups) return all;
  const size = ranks.length / groups.count;
  const worth = Array.from({ length: groups.count }, (_, group) =>
    ranks
      .slice(group * size, (group + 1) * size)
      .toSorted((a, b) => b - a)
      .slice(0, groups.best)
      .reduce((sum, rank) => sum + rank),
  );
  const kept = best(
    worth,
    worth.map((_, group) => group),
    groups.chosen,
  );
  return all.filter((expert) => kept.includes(Math.floor(expert / size)));
}

const best = (values: readonly number[], among: readonly number[], count: number): number[] =>
  among.toSorted((a, b) => values[b]! - values[a]! || a - b).slice(0, count);

function softmax(row: readonly number[]): number[] {
  const largest = Math.max(...row);
  const exponentials = row.map((value) => Math.exp(value - largest));
  const total = exponentials.reduce((sum, value) => sum + value, 0);
  return exponentials.map((value) => value / total);
}

/** Pairs expert by expert, and the same in tiles: expert, first in order, count, 0. */
export function groupPairs(choice: readonly number[], experts: number, tile: number) {
  const order: number[] = [];
  const tiles: number[][] = [];
  for (let expert = 0; expert < experts; expert++) {
    const pairs = [...choice.keys()].filter((pair) => choice[pair] === expert);
    for (let done = 0; done < pairs.length; done += tile) {
      tiles.push([expert, order.length + done, Math.min(tile, pairs.length - done), 0]);
    }
    order.push(...pairs);
  }
  return { order, tiles };
}

/** y[pair] = x[pair / share] · its expert's weight, in the order of addition of every linear layer. weights: [experts][outputs, columns] */
export const expertProducts = (
  x: Matrix,
  weights: readonly Matrix[],
  choice: readonly number[],
  share: number,
): number[][] => choice.map((expert, pair) => linearInOrder([x[Math.floor(pair / share)]!], weights[expert]!)[0]!);

/** y[token] = Σ weight · x of its pairs, from first to last. x: [tokens · chosen, columns] */
export const combineExperts = (x: Matrix, weights: Matrix): number[][] =>
  weights.map((of, token) =>
    Array.from(x[0]!, (_, column) =>
      Array.from(of).reduce((sum, weight, i) => sum + weight * x[token * of.length + i]![column]!, 0),
    ),
  );

/** y + sigmoid(gate) x, with one gate for each row. */
export const addGated = (y: Matrix, x: Matrix, gate: ArrayLike<number>): number[][] =>
  y.map((row, token) => Array.from(row, (value, column) => value + x[token]![column]! / (1 + Math.exp(-gate[token]!))));
