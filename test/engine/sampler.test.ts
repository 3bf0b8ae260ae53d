import { describe, expect, test } from "bun:test";
import { exp } from "../../src/engine/exp.ts";
import { drawAt } from "../../src/engine/random.ts";
import { type Candidates, candidatesOf, draw, sampleToken } from "../../src/engine/sampler.ts";
import type { Sampling } from "../../src/protocol/sampling.ts";
import fixture from "../fixtures/sampling.json";
import { seededRandom } from "../support/safetensors.ts";
import { draftBySorting } from "./sampler-reference.ts";

const CASES = fixture.cases.map((row) => {
  const { do_sample, ...shape } = row.options as Record<string, unknown>;
  const sampling = { temperature: do_sample === false ? 0 : 1, ...shape } as Sampling;
  return [row.name, { ...row, sampling, logits: fromBits(row.logits) }] as const;
});

describe("the tokens that may be drawn, and their probabilities, are transformers':", () => {
  test.each(CASES)("%s", (name, { logits, history, sampling, logprobs }) => {
    if (sampling.temperature === 0) return; // below
    const { ids, scores } = candidatesOf(logits, sampling, history)!;
    const total = Math.log([...scores].reduce((sum, score) => sum + Math.exp(score - scores[0]!), 0)) + scores[0]!;
    const support = logprobs.flatMap((logprob, id) => (logprob === null ? [] : [id]));
    if (!isCutAmongEquals(name)) {
      expect([...ids]).toEqual(support);
      for (const [index, id] of ids.entries()) expect(scores[index]! - total).toBeCloseTo(logprobs[id]!, 5);
    }
    const ours = [...scores].toSorted((a, b) => a - b).map((score) => score - total);
    const theirs = support.map((id) => logprobs[id]!).toSorted((a, b) => a - b);
    expect(ours.length).toBe(theirs.length);
    for (const [index, logprob] of theirs.entries()) expect(ours[index]).toBeCloseTo(logprob, 5);
  });

  /** Where top_p takes some of several equal tokens, torch's unstable sort has no rule which; ours are the lowest ids. */
  const isCutAmongEquals = (name: string) => /^ties-(top-k-)?top-p$|^equal-/.test(name);
});

test("where top_p takes some of several equal tokens, it takes the lowest ids: so greedy's is always one", () => {
  const logits = Float32Array.of(1, 2, 2, 2, 1);
  expect([...candidatesOf(logits, { temperature: 1, top_p: 0.5 }, [])!.ids]).toEqual([1, 2]);
  expect([...candidatesOf(logits, { temperature: 1, top_p: 1e-9 }, [])!.ids]).toEqual([1]);
});

test.each(CASES.filter(([, { sampling }]) => sampling.temperature === 0))(
  "greedy takes the token that transformers takes: %s",
  (_, { logits, history, sampling, argmax }) => {
    expect(sampleToken(logits, sampling, { history, position: 7 })).toEqual({ id: argmax });
  },
);

test("nothing said is greedy", () => {
  expect(sampleToken(Float32Array.of(1, 3, 3, 2), {}, { history: [], position: 0 })).toEqual({ id: 1 });
});

test.each(CASES)("logprobs are those of the raw logits: %s", (_, { logits, history, sampling, raw_logprobs }) => {
  const count = Math.min(6, logits.length);
  const { id, logprobs } = sampleToken(logits, { ...sampling, seed: 3, logprobs: count }, { history, position: 1 });
  const best = [...logits.keys()].toSorted((a, b) => logits[b]! - logits[a]! || a - b).slice(0, count);
  expect(logprobs!.logprob).toBeCloseTo(raw_logprobs[id]!, 5);
  expect(logprobs!.top.map((one) => one.id)).toEqual(best);
  for (const one of logprobs!.top) expect(one.logprob).toBeCloseTo(raw_logprobs[one.id] ?? -Infinity, 5);
});

test("logprobs 0 reports the token's own, and an absent one nothing", () => {
  const context = { history: [], position: 0 };
  expect(sampleToken(Float32Array.of(0, 0), { logprobs: 0 }, context)).toEqual({
    id: 0,
    logprobs: { logprob: -Math.log(2), top: [] },
  });
  expect(sampleToken(Float32Array.of(0, 0), {}, context)).not.toHaveProperty("logprobs");
});

test("buckets and partial sorts leave what sorting everything leaves, for 300 random rows with many ties", () => {
  const random = seededRandom(5);
  for (let round = 0; round < 300; round++) {
    const count = 1 + Math.floor(random() * 3000);
    const step = [0.25, 0.0625, 1e-4][round % 3]!;
    const logits = Float32Array.from({ length: count }, () => Math.round((random() - 0.5) * 40) * step);
    const sampling = {
      temperature: 0.2 + random() * 2,
      top_k: random() < 0.5 ? 0 : Math.floor(random() * count * 1.2),
      top_p: random() < 0.3 ? 1 : 1e-6 + random() * 0.9999,
      min_p: random() < 0.5 ? 0 : random() * 0.5,
      repetition_penalty: random() < 0.5 ? 1 : 0.5 + random(),
    };
    const history = Array.from({ length: 50 }, () => Math.floor(random() * count));
    expect(idsAndScores(candidatesOf(logits, sampling, history)!)).toEqual(draftBySorting(logits, sampling, history));
  }
});

describe("draws follow the distribution", () => {
  test.each(["everything", "temperature-high", "ties-top-k-3", "min-p-small", "large-top-p"])(
    "of the case %s, by the chi-square of thousands of positions",
    (name) => {
      const { logits, history, sampling, logprobs } = CASES.find(([other]) => other === name)![1];
      const draws = logits.length > 100 ? 4_000 : 10_000;
      const counts = new Float64Array(logits.length);
      for (let position = 0; position < draws; position++) {
        counts[sampleToken(logits, { ...sampling, seed: 42 }, { history, position }).id]!++;
      }
      const { statistic, freedom } = chiSquare(counts, logprobs, draws);
      const bound = freedom + 4 * Math.sqrt(2 * freedom); // one in about 10,000 seeds is beyond
      expect(statistic).toBeLessThan(bound);
      if (freedom > 3) expect(statistic).toBeGreaterThan(freedom - 4 * Math.sqrt(2 * freedom));
    },
  );
});

describe("a draw depends on the seed and the position alone:", () => {
  const logits = fromBits(fixture.cases[0]!.logits);
  const ids = (seed: number, positions: number[]) =>
    positions.map((position) => sampleToken(logits, { temperature: 1, seed }, { history: [], position }).id);
  const upTo = Array.from({ length: 200 }, (_, position) => position);

  test("whatever was drawn before, and in whatever order", () => {
    expect(ids(7, upTo.toReversed()).toReversed()).toEqual(ids(7, upTo));
    expect(ids(7, [150])).toEqual([ids(7, upTo)[150]!]);
  });

  test("other seeds and other positions give other draws", () => {
    expect(ids(8, upTo)).not.toEqual(ids(7, upTo));
    expect(ids(-7, upTo)).not.toEqual(ids(7, upTo));
    const shifted = upTo.map((position) => position + 1);
    expect(ids(7, shifted)).not.toEqual(ids(7, upTo));
  });

  test("the order of the history, and repeats in it, change nothing", () => {
    const sampling = { temperature: 1, seed: 7, repetition_penalty: 1.5 };
    const draw = (history: Iterable<number>) => sampleToken(logits, sampling, { history, position: 3 });
    expect(draw([9, 1, 1, 4, 9])).toEqual(draw(new Set([4, 9, 1])));
  });

  test("the logits stay as they are", () => {
    const copy = logits.slice();
    sampleToken(copy, { temperature: 0.5, repetition_penalty: 2, top_p: 0.5 }, { history: [0, 1, 2], position: 0 });
    expect([...copy]).toEqual([...logits]);
  });
});

test("the first candidates' share is met by small random numbers, the last one's by large ones", () => {
  const logits = Float32Array.of(0, 0, 0, 0);
  for (let position = 0; position < 400; position++) {
    const { id } = sampleToken(logits, { temperature: 1, seed: 5 }, { history: [], position });
    expect(id).toBe(Math.floor((drawAt(5, position) / 2 ** 53) * 4));
  }
});

test("a token whose share is nothing is never drawn, and the largest random number draws the last with one", () => {
  const candidates = { ids: Uint32Array.of(3, 5, 8), scores: Float32Array.of(-100, 0, -100) };
  expect([draw(candidates, 10, 0), draw(candidates, 10, 2 ** 53 - 1)]).toEqual([5, 5]);
  const equal = { ids: Uint32Array.of(3, 5), scores: Float32Array.of(1, 1) };
  expect([0, 2 ** 52 - 1, 2 ** 52, 2 ** 53 - 1].map((random) => draw(equal, 10, random))).toEqual([3, 3, 5, 5]);
});

test.each([1e-4, 1e-30, 1e-44, 1e-320])("a temperature of %p is nearly greedy, and no NaN", (temperature) => {
  const logits = Float32Array.of(-3, 2, 1.9921875, -Infinity);
  expect(sampleToken(logits, { temperature, seed: 1 }, { history: [], position: 0 })).toEqual({ id: 1 });
});

test.each([
  ["a NaN", [1, NaN, 2], "the logits have a NaN"],
  ["an infinity", [1, Infinity, 2], "the largest logit is Infinity"],
  ["no token at all", [-Infinity, -Infinity], "the largest logit is -Infinity"],
])("logits with %s are an error, not a token", (_, logits, message) => {
  for (const temperature of [0, 1]) {
    expect(() => sampleToken(Float32Array.from(logits), { temperature }, { history: [], position: 0 })).toThrow(
      expect.objectContaining({ code: "non_finite", message }),
    );
  }
});

test.each([1e-320, 1e-38, 1e300])(
  "a repetition_penalty of %p that leaves no numbers is named, not the model",
  (penalty) => {
    const sampling = { temperature: 0, repetition_penalty: penalty };
    const logits = Float32Array.of(50, 0, -50);
    const sample = () => sampleToken(logits, sampling, { history: [0, 1, 2], position: 0 });
    if (penalty > 1) return expect(sample()).toEqual({ id: 0 });
    expect(sample).toThrow(
      expect.objectContaining({
        code: "non_finite",
        message: expect.stringContaining(`repetition_penalty ${penalty} `),
      }),
    );
  },
);

test("e^x is right to the last place or the one before", () => {
  const random = seededRandom(3);
  let worst = 0;
  for (let i = 0; i < 50_000; i++) {
    const x = -random() * 690;
    worst = Math.max(worst, Math.abs(exp(x) / Math.exp(x) - 1));
  }
  expect(worst).toBeLessThan(2.5 * 2 ** -52);
  expect([exp(0), exp(-Infinity), exp(-1000)]).toEqual([1, 0, 0]);
});

function fromBits(bits: readonly number[]): Float32Array {
  return new Float32Array(Uint32Array.from(bits, (bf16) => (bf16 & 0xffff) << 16).buffer);
}

const idsAndScores = ({ ids, scores }: Candidates) => [...ids].map((id, index) => ({ id, score: scores[index]! }));

/** Outcomes expected fewer than 8 times are counted together. */
function chiSquare(counts: Float64Array, logprobs: readonly (number | null)[], draws: number) {
  let statistic = 0;
  let cells = 0;
  const rest = { expected: 0, seen: 0 };
  const add = (seen: number, expected: number) => {
    statistic += (seen - expected) ** 2 / expected;
    cells++;
  };
  for (const [id, seen] of counts.entries()) {
    const expected = draws * Math.exp(logprobs[id] ?? -Infinity);
    if (expected >= 8) add(seen, expected);
    else {
      rest.expected += expected;
      rest.seen += seen;
    }
  }
  if (rest.expected > 0.5) add(rest.seen, rest.expected);
  return { statistic, freedom: cells - 1 };
}
