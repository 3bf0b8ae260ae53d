import { UserError } from "../base/errors.ts";
import { isDrawn, type Sampling } from "../protocol/sampling.ts";
import { exp } from "./exp.ts";
import { drawAt } from "./random.ts";
import type { TokenLogprobs } from "./types.ts";

export interface SampleContext {
  /** Every token of the sequence before this one, the prompt's too, in any order and repeated or not. */
  readonly history: Iterable<number>;
  /** Where the token will stand: real tokens of the sequence before it. */
  readonly position: number;
}

export interface SampledToken {
  readonly id: number;
  readonly logprobs?: TokenLogprobs;
}

/**
 * One token from the logits of the last position. `logits`: [vocabSize], the bfloat16 values; they stay as they are.
 *
 * In transformers' order (`GenerationMixin._get_logits_processor`) and with its float32 scores: repetition penalty; then,
 * where a token is drawn, temperature, top_k, top_p, min_p, and a draw by softmax. Greedy: the largest score, the lowest
 * id among equals. The draw depends on `sampling.seed` and the position alone, see `random.ts`; whoever opens a
 * conversation sets the seed, and an absent one is 0.
 *
 * Logprobs are of the raw logits, before all of this: they say what the model thinks, not how it was asked.
 *
 * @throws UserError `non_finite` for a NaN or a plus infinity, or where every logit is minus infinity.
 */
export function sampleToken(
  logits: Float32Array,
  sampling: Sampling,
  { history, position }: SampleContext,
): SampledToken {
  const penalty = sampling.repetition_penalty ?? 1;
  const scores = penalize(logits, penalty, history);
  const best = argmax(scores);
  if (best === undefined) throw nonFinite(logits, penalty);
  const drawn = isDrawn(sampling) ? filterScores(scores, scores[best]!, sampling) : undefined;
  const id = drawn ? draw(drawn, logits.length, drawAt(sampling.seed ?? 0, position)) : best;
  return sampling.logprobs === undefined ? { id } : { id, logprobs: logprobsOf(logits, id, sampling.logprobs) };
}

/** Tokens that may be drawn: ids ascending, and their scores. */
export interface Candidates {
  readonly ids: Uint32Array;
  readonly scores: Float32Array;
}

/** The distribution that a token is drawn from, as the tests compare it with transformers': undefined is greedy. */
export function candidatesOf(
  logits: Float32Array,
  sampling: Sampling,
  history: Iterable<number>,
): Candidates | undefined {
  const scores = penalize(logits, sampling.repetition_penalty ?? 1, history);
  return filterScores(scores, scores[argmax(scores)!]!, sampling);
}

/** A copy of the logits; what is in the sequence already has, once, its positive score divided, a negative multiplied. */
function penalize(logits: Float32Array, penalty: number, history: Iterable<number>): Float32Array {
  const scores = logits.slice();
  if (penalty === 1) return scores;
  const factor = Math.fround(penalty);
  for (const id of history instanceof Set ? history : new Set(history)) {
    const score = scores[id];
    if (score !== undefined) scores[id] = score < 0 ? score * factor : score / factor;
  }
  return scores;
}

/** Undefined where there is a NaN, or the largest score is infinite. */
function argmax(scores: Float32Array): number | undefined {
  let best = 0;
  for (let id = 0; id < scores.length; id++) {
    const score = scores[id]!;
    if (Number.isNaN(score)) return undefined;
    if (score > scores[best]!) best = id;
  }
  return Number.isFinite(scores[best]) ? best : undefined;
}

function nonFinite(logits: Float32Array, penalty: number): UserError {
  if (argmax(logits) !== undefined) {
    const problem = `repetition_penalty ${penalty} makes scores that are no numbers any more`;
    return new UserError("non_finite", problem, "give one nearer to 1");
  }
  const hasNan = logits.some((score) => Number.isNaN(score));
  return new UserError(
    "non_finite",
    hasNan ? "the logits have a NaN" : `the largest logit is ${logits.reduce((a, b) => Math.max(a, b))}`,
    "a value in the model left the range of bfloat16: see what `meshnet verify` says of this checkpoint",
  );
}

/** Undefined where the temperature is so low that only the best token is left. */
function filterScores(scores: Float32Array, best: number, sampling: Sampling): Candidates | undefined {
  const temperature = Math.fround(sampling.temperature ?? 1);
  if (temperature === 0 || !Number.isFinite(Math.fround(best / temperature))) return undefined;
  const top = topK(possible(scores, temperature), sampling.top_k ?? 0);
  return minP(topP(top, sampling.top_p ?? 1, scores.length), sampling.min_p ?? 0, scores.length);
}

/** Every token but those whose score is minus infinity, divided by the temperature. */
function possible(scores: Float32Array, temperature: number): Candidates {
  const ids = new Uint32Array(scores.length);
  const scaled = new Float32Array(scores.length);
  let count = 0;
  for (let id = 0; id < scores.length; id++) {
    const score = Math.fround(scores[id]! / temperature);
    if (score === -Infinity) continue;
    ids[count] = id;
    scaled[count++] = score;
  }
  return { ids: ids.subarray(0, count), scores: scaled.subarray(0, count) };
}

/** Removes what is below the k-th largest; all that equal it stay. */
function topK(candidates: Candidates, k: number): Candidates {
  const { scores } = candidates;
  return k === 0 || k >= scores.length ? candidates : kept(candidates, atLeast(scores, largest(scores, k)));
}

/**
 * Removes the least likely while their probabilities, added up from the least, stay within 1 - p. Among equals the highest
 * ids go first (torch's sort has them in no certain order); the token that greedy takes stays.
 */
function topP(candidates: Candidates, p: number, vocabSize: number): Candidates {
  if (p >= 1) return candidates;
  const { scores } = candidates;
  const { weights, total } = weightsOf(scores, vocabSize);
  const limit = Math.fround(1 - p);
  const goes = (sum: number) => Math.fround(sum / total) <= limit;

  // Whole buckets go first, without a look at the order in them: sums of whole numbers are exact.
  const bits = orderedBits(scores);
  const shift = bucketShift(bits.length);
  const buckets = new Float64Array(2 ** (32 - shift));
  let top = 0;
  for (let i = 0; i < bits.length; i++) {
    const bucket = bits[i]! >>> shift;
    buckets[bucket]! += weights[i]!;
    if (bucket > top) top = bucket;
  }
  let last = 0;
  let sum = 0;
  while (last < top && goes(sum + buckets[last]!)) sum += buckets[last++]!;

  const mask = new Uint8Array(bits.length);
  for (let i = 0; i < mask.length; i++) mask[i] = bits[i]! >>> shift >= last ? 1 : 0;
  for (const i of ascending(bits, shift, last).subarray(0, last === top ? -1 : undefined)) {
    sum += weights[i]!;
    if (!goes(sum)) break;
    mask[i] = 0;
  }
  return kept(candidates, mask);
}

/** Removes what is less likely than min_p times the best. */
function minP(candidates: Candidates, minimum: number, vocabSize: number): Candidates {
  if (minimum === 0) return candidates;
  const { scores } = candidates;
  const best = max(scores);
  const { total, scale } = weightsOf(scores, vocabSize);
  const sum = total / scale;
  const least = Math.fround(Math.fround(minimum) * Math.fround(1 / sum));
  const mask = new Uint8Array(scores.length);
  for (let i = 0; i < mask.length; i++) mask[i] = Math.fround(exp(scores[i]! - best) / sum) >= least ? 1 : 0;
  return kept(candidates, mask);
}

/** `random`: 0 to 2^53 - 1. The candidate in whose share of the weights it falls. */
export function draw({ ids, scores }: Candidates, vocabSize: number, random: number): number {
  const { weights, total } = weightsOf(scores, vocabSize);
  const target = Math.min(Math.floor((random / 2 ** 53) * total), total - 1);
  let index = 0;
  for (let sum = weights[0]!; sum <= target; sum += weights[index]!) index++;
  return ids[index]!;
}

/**
 * e^(score - best) as whole numbers, the best one `scale`. Sums of them are exact in float64, so they are the same in
 * whatever order they are taken. What is rounded away is below 2^-34 of the best, for 2^18 tokens.
 */
function weightsOf(scores: Float32Array, vocabSize: number) {
  const scale = 2 ** (52 - Math.ceil(Math.log2(vocabSize))); // vocabSize of them add up to less than 2^53
  const best = max(scores);
  const weights = new Float64Array(scores.length);
  let total = 0;
  for (let i = 0; i < weights.length; i++) {
    weights[i] = Math.floor(exp(scores[i]! - best) * scale + 0.5);
    total += weights[i]!;
  }
  return { weights, total, scale };
}

/** 1 for each score that is not below `least`. */
function atLeast(scores: Float32Array, least: number): Uint8Array {
  const mask = new Uint8Array(scores.length);
  for (let i = 0; i < mask.length; i++) mask[i] = scores[i]! >= least ? 1 : 0;
  return mask;
}

function kept({ ids, scores }: Candidates, mask: Uint8Array): Candidates {
  const keptIds = new Uint32Array(ids.length);
  const keptScores = new Float32Array(ids.length);
  let count = 0;
  for (let i = 0; i < mask.length; i++) {
    if (!mask[i]) continue;
    keptIds[count] = ids[i]!;
    keptScores[count++] = scores[i]!;
  }
  return { ids: keptIds.subarray(0, count), scores: keptScores.subarray(0, count) };
}

function upTo(count: number): Uint32Array {
  const ids = new Uint32Array(count);
  for (let id = 0; id < count; id++) ids[id] = id;
  return ids;
}

function max(scores: Float32Array): number {
  let best = -Infinity;
  for (let i = 0; i < scores.length; i++) if (scores[i]! > best) best = scores[i]!;
  return best;
}

/** The k-th largest of them, 1 ≤ k ≤ their number. */
function largest(scores: Float32Array, k: number): number {
  const bits = orderedBits(scores);
  const shift = bucketShift(bits.length);
  const counts = new Uint32Array(2 ** (32 - shift));
  for (let i = 0; i < bits.length; i++) counts[bits[i]! >>> shift]!++;
  let bucket = counts.length - 1;
  let above = 0;
  while (above + counts[bucket]! < k) above += counts[bucket--]!;
  return scores[ascending(bits, shift, bucket).at(above - k)!]!;
}

/** Scores whose ordered bits are equal above this one share a bucket: 2^16 buckets for many scores, 2 for few. */
const bucketShift = (count: number): number => (count > 4096 ? 16 : 31);

/** The indices of the scores in a bucket, from the smallest score to the largest, from the last to the first among equals. */
function ascending(bits: Uint32Array, shift: number, bucket: number): Uint32Array {
  let members = 0;
  for (let i = 0; i < bits.length; i++) if (bits[i]! >>> shift === bucket) members++;
  const keys = new Float64Array(members);
  let count = 0;
  for (let i = 0; i < bits.length; i++) {
    if (bits[i]! >>> shift === bucket) keys[count++] = bits[i]! * MOST_TOKENS + (MOST_TOKENS - 1 - i);
  }
  return Uint32Array.from(keys.sort(), (key) => MOST_TOKENS - 1 - (key % MOST_TOKENS));
}

/** 32 bits of a score and an index below this are a float64's 53. */
const MOST_TOKENS = 2 ** 21;

/** Whole numbers of 32 bits in the scores' order. */
function orderedBits(scores: Float32Array): Uint32Array {
  const values = new Float32Array(scores.length);
  for (let i = 0; i < values.length; i++) values[i] = scores[i]! + 0; // -0 to 0, which it equals
  const bits = new Uint32Array(values.buffer);
  for (let i = 0; i < bits.length; i++) bits[i] = bits[i]! & 0x80000000 ? ~bits[i]! : bits[i]! | 0x80000000;
  return bits;
}

/** Of a token and of the `count` likeliest, by the raw logits. */
export function logprobsOf(logits: Float32Array, id: number, count: number): TokenLogprobs {
  const best = max(logits);
  let sum = 0;
  for (let i = 0; i < logits.length; i++) sum += exp(logits[i]! - best);
  const shift = best + Math.log(sum);
  const top = likeliest(logits, count).map((token) => ({ id: token, logprob: logits[token]! - shift }));
  return { logprob: logits[id]! - shift, top };
}

/** The ids of the largest logits, best first, the lowest ids among equals. */
function likeliest(logits: Float32Array, count: number): number[] {
  if (count === 0) return [];
  const mask = atLeast(logits, largest(logits, Math.min(count, logits.length)));
  const ids = kept({ ids: upTo(logits.length), scores: logits }, mask).ids;
  return [...ids].toSorted((a, b) => logits[b]! - logits[a]! || a - b).slice(0, count);
}
