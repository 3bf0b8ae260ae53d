import { exp } from "../../src/engine/exp.ts";
import type { Sampling } from "../../src/protocol/sampling.ts";

/** The definition of the filters, with everything sorted at every step. */
export function draftBySorting(logits: Float32Array, sampling: Required<Pick<Sampling, Shape>>, history: number[]) {
  const { temperature, top_k, top_p, min_p, repetition_penalty } = sampling;
  const fround = Math.fround;
  const seen = new Set(history);
  const scale = 2 ** (52 - Math.ceil(Math.log2(logits.length)));
  let tokens = [...logits].map((logit, id) => {
    const penalty = fround(repetition_penalty);
    const penalized = seen.has(id) ? fround(logit < 0 ? logit * penalty : logit / penalty) : logit;
    return { id, score: fround(penalized / fround(temperature)) };
  });
  const weighed = () => {
    const best = Math.max(...tokens.map(({ score }) => score));
    const rows = tokens.map((token) => ({ ...token, weight: Math.floor(exp(token.score - best) * scale + 0.5) }));
    return { best, rows, total: rows.reduce((sum, { weight }) => sum + weight, 0) };
  };
  if (top_k > 0 && top_k < tokens.length) {
    const least = tokens.map(({ score }) => score).toSorted((a, b) => b - a)[top_k - 1]!;
    tokens = tokens.filter(({ score }) => score >= least);
  }
  if (top_p < 1) {
    const { rows, total } = weighed();
    const ascending = rows.toSorted((a, b) => a.score - b.score || b.id - a.id);
    let sum = 0;
    const removed = new Set<number>();
    for (const { id, weight } of ascending.slice(0, -1)) {
      sum += weight;
      if (fround(sum / total) <= fround(1 - top_p)) removed.add(id);
    }
    tokens = tokens.filter(({ id }) => !removed.has(id));
  }
  if (min_p > 0) {
    const { best, total } = weighed();
    const least = fround(fround(min_p) * fround(1 / (total / scale)));
    tokens = tokens.filter(({ score }) => fround(exp(score - best) / (total / scale)) >= least);
  }
  return tokens;
}

type Shape = "temperature" | "top_k" | "top_p" | "min_p" | "repetition_penalty";
