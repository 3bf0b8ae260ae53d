import { describe, expect, test } from "bun:test";
import { LogitComparison, type LogitQuality, outsideBounds } from "../../src/server/logit-quality.ts";

const compare = (reference: number[], candidate: number[], next?: number): LogitQuality => {
  const comparison = new LogitComparison();
  comparison.add(Float32Array.from(reference), Float32Array.from(candidate), next);
  return comparison.quality;
};

describe("the quality of logits", () => {
  test("is perfect of the same ones", () => {
    expect(compare([1, 2, 3, 4], [1, 2, 3, 4], 3)).toMatchObject({
      rmsError: 0,
      maxError: 0,
      relativeRms: 0,
      klDivergence: 0,
      top1Agreement: 1,
      perplexityRatio: 1,
    });
  });

  test("does not count what all of a position share, but for the errors as they are", () => {
    const { rmsError, maxError, relativeRms, klDivergence } = compare([1, 2, 3, 4], [3, 4, 5, 6]);
    expect({ rmsError, maxError, relativeRms }).toEqual({ rmsError: 2, maxError: 2, relativeRms: 0 });
    expect(klDivergence).toBeCloseTo(0, 12);
  });

  test("is that of the textbook", () => {
    // p = (3/4, 1/4), q = (1/4, 3/4)
    const quality = compare([Math.log(3), 0], [0, Math.log(3)], 0);
    expect(quality.klDivergence).toBeCloseTo(0.5 * Math.log(3), 6);
    expect(quality.perplexity).toBeCloseTo(4, 6);
    expect(quality.perplexityRatio).toBeCloseTo(3, 6);
    expect(quality.relativeRms).toBeCloseTo(2, 6);
    expect(quality.top1Agreement).toBe(0);
  });

  test("counts a tie for the lowest id, as greedy decoding does", () => {
    expect(compare([2, 2, 1], [2, 1, 1]).top1Agreement).toBe(1);
    expect(compare([2, 2, 1], [1, 2, 1]).top1Agreement).toBe(0);
  });
});

describe("the judgement", () => {
  const bounds = { relativeRms: 0.1, klDivergence: 0.1, sureAgreement: 0.9, perplexityRatio: 1.1 };
  const perfect = compare([1, 2], [1, 2], 0);

  test("says what is outside with both numbers, and what is no number is outside", () => {
    expect(outsideBounds(perfect, bounds)).toEqual([]);
    const off = { ...perfect, sureAgreement: 0.5, surePositions: 100, klDivergence: Number.NaN };
    expect(outsideBounds(off, bounds)).toEqual([
      "the KL divergence is NaN, above 0.1",
      "the top-1 agreement where bfloat16 is sure is 0.500, below 0.9",
    ]);
  });

  test("does not judge agreement by a handful of tokens, nor by those of which bfloat16 itself is unsure", () => {
    expect(outsideBounds({ ...perfect, sureAgreement: 0.5, surePositions: 3 }, bounds)).toEqual([]);
    const unsure = compare([1, 1.01, 1, 1], [1.01, 1, 1, 1], 0);
    expect(unsure).toMatchObject({ top1Agreement: 0, sureAgreement: null, surePositions: 0 });
    expect(outsideBounds({ ...unsure, relativeRms: 0 }, bounds)).toEqual([]);
  });
});
