import { describe, expect, test } from "bun:test";
import { checkSampling, isDrawn, MOST_LOGPROBS, type Sampling } from "../../src/protocol/sampling.ts";

const WHERE = "header X-Meshnet-Sampling";

test.each<Sampling>([
  {},
  { temperature: 0, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1e-3, seed: 0, logprobs: 0, stop_token_ids: [] },
  { temperature: 100, top_k: 1e6, top_p: 1e-9, min_p: 1, repetition_penalty: 9, seed: -5, logprobs: MOST_LOGPROBS },
  { seed: Number.MAX_SAFE_INTEGER, stop_token_ids: [0, 151_645] },
  { seed: Number.MIN_SAFE_INTEGER },
])("%j is taken as it is", (sampling) => {
  expect(checkSampling(structuredClone(sampling), WHERE)).toEqual(sampling);
});

describe("a value that cannot be is refused with it and with what can be:", () => {
  test.each([
    ["temperature", -0.1, "-0.1", "a number from 0"],
    ["temperature", NaN, "NaN", "a number from 0"],
    ["temperature", Infinity, "Infinity", "a number from 0"],
    ["temperature", "1", '"1"', "a number from 0"],
    ["temperature", null, "null", "a number from 0"],
    ["temperature", true, "true", "a number from 0"],
    ["top_k", -1, "-1", "a whole number from 0 to 2^53 - 1"],
    ["top_k", 1.5, "1.5", "a whole number from 0 to 2^53 - 1"],
    ["top_k", 2 ** 60, "about 1.153e+18", "a whole number from 0 to 2^53 - 1"],
    ["top_p", 0, "0", "a number above 0, up to 1"],
    ["top_p", 1.0001, "1.0001", "a number above 0, up to 1"],
    ["top_p", [0.5], "[0.5]", "a number above 0, up to 1"],
    ["min_p", -1e-9, "-1e-9", "a number from 0 to 1"],
    ["min_p", 2, "2", "a number from 0 to 1"],
    ["repetition_penalty", 0, "0", "a number above 0"],
    ["repetition_penalty", -1, "-1", "a number above 0"],
    ["seed", 0.5, "0.5", "a whole number from -(2^53 - 1) to 2^53 - 1"],
    ["seed", 2 ** 53, "about 9.007e+15", "a whole number from -(2^53 - 1) to 2^53 - 1"],
    ["seed", "7", '"7"', "a whole number from -(2^53 - 1) to 2^53 - 1"],
    ["logprobs", 21, "21", "a whole number from 0 to 20"],
    ["logprobs", true, "true", "a whole number from 0 to 20"],
    ["stop_token_ids", 5, "5", "a list of at most 1024 token ids"],
    ["stop_token_ids", [1, -1], "[1,-1]", "a list of at most 1024 token ids"],
  ])("%s %p", (field, value, shown, allowed) => {
    expect(() => checkSampling({ [field]: value }, WHERE)).toThrow(
      expect.objectContaining({
        code: "malformed",
        message: `${WHERE} has ${field} ${shown}, and ${field} is ${allowed}`,
        hint: `give ${allowed}`,
      }),
    );
  });

  test("a list of ids beyond any use", () => {
    const ids = Array.from({ length: 1025 }, (_, id) => id);
    expect(() => checkSampling({ stop_token_ids: ids }, WHERE)).toThrow("…, and stop_token_ids is a list of at most");
  });
});

test.each([
  [{ heat: 1 }, `${WHERE} has the unknown field "heat"`],
  [{ max_tokens: 5 }, `${WHERE} has the unknown field "max_tokens"`],
  [JSON.parse('{"__proto__": 1}'), `${WHERE} has the unknown field "__proto__"`],
  [{ toString: 1 }, `${WHERE} has the unknown field "toString"`],
  [[], `${WHERE} is not a JSON object`],
  [null, `${WHERE} is not a JSON object`],
  ["hot", `${WHERE} is not a JSON object`],
])("%j is refused, and the fields are named", (value, message) => {
  expect(() => checkSampling(value, WHERE)).toThrow(
    expect.objectContaining({
      code: "malformed",
      message,
      hint: "its fields are temperature, top_k, top_p, min_p, repetition_penalty, seed, logprobs, stop_token_ids",
    }),
  );
});

test.each<[Sampling, boolean]>([
  [{}, false],
  [{ temperature: 0, top_k: 40, seed: 3 }, false], // nothing to choose from
  [{ repetition_penalty: 1.2, logprobs: 5, stop_token_ids: [1] }, false],
  [{ temperature: 0.1 }, true],
  [{ top_k: 40 }, true],
  [{ seed: 0 }, true],
])("of %j a token is drawn: %j", (sampling, drawn) => {
  expect(isDrawn(sampling)).toBe(drawn);
});
