import { describe, expect, test } from "bun:test";
import { generationDefaults, withDefaults } from "../../src/models/generation-config.ts";

/** What transformers 5.18 prepares for `generate` where nothing is configured. */
const NOTHING = {
  eosTokenIds: [],
  doSample: false,
  temperature: 1,
  topK: 50,
  topP: 1,
  minP: 0,
  repetitionPenalty: 1,
  maxNewTokens: undefined,
};

// Each as `_prepare_generation_config` of transformers 5.18 has it for such files.
describe("a model's defaults are transformers':", () => {
  test("without generation_config.json they are in config.json", () => {
    const config = { eos_token_id: [3, 4], do_sample: true, temperature: 0.5, repetition_penalty: 1.3 };
    expect(generationDefaults(undefined, config)).toEqual({
      ...NOTHING,
      eosTokenIds: [3, 4],
      doSample: true,
      temperature: 0.5,
      repetitionPenalty: 1.3,
    });
  });

  test("or in its text_config", () => {
    expect(generationDefaults(undefined, { text_config: { eos_token_id: 7 } }).eosTokenIds).toEqual([7]);
    expect(generationDefaults(undefined, { eos_token_id: 3, text_config: { eos_token_id: 7 } }).eosTokenIds).toEqual([
      3,
    ]);
  });

  test("with one, config.json has no word, not even about the end of text", () => {
    expect(generationDefaults({}, { eos_token_id: 3, temperature: 0.5 })).toEqual(NOTHING);
    expect(generationDefaults({ top_p: 0.9 }, { eos_token_id: 3 })).toEqual({ ...NOTHING, topP: 0.9 });
  });

  test("null is absent", () => {
    const generation = { eos_token_id: null, do_sample: true, top_k: null, temperature: 0.6 };
    expect(generationDefaults(generation, { eos_token_id: 3 })).toEqual({
      ...NOTHING,
      doSample: true,
      temperature: 0.6,
    });
  });

  test("an end of text that is -1 is none", () => {
    expect(generationDefaults({ eos_token_id: -1 }, {}).eosTokenIds).toEqual([]);
    expect(generationDefaults({ eos_token_id: 5 }, {}).eosTokenIds).toEqual([5]);
  });
});

test.each([
  [{ temperature: -1 }, "generation_config.json: temperature is -1, and it can be a number from 0"],
  [{ temperature: "0.7" }, 'generation_config.json: temperature is "0.7", and it can be a number from 0'],
  [{ top_k: 1.5 }, "generation_config.json: top_k is 1.5, and it can be a whole number from 0"],
  [{ top_p: 0 }, "generation_config.json: top_p is 0, and it can be a number above 0, up to 1"],
  [{ repetition_penalty: 0 }, "generation_config.json: repetition_penalty is 0, and it can be a number above 0"],
  [
    { eos_token_id: ["</s>"] },
    'generation_config.json: eos_token_id is ["</s>"], and it can be a token id or a list of them',
  ],
  [{ do_sample: 1 }, "generation_config.json: do_sample is 1, and it can be true or false"],
])("%j is refused", (generation, message) => {
  expect(() => generationDefaults(generation, {})).toThrow(expect.objectContaining({ code: "bad_model", message }));
});

describe("what a caller says goes before what the model says:", () => {
  const plain = generationDefaults({}, {});
  const chatty = generationDefaults({ do_sample: true, temperature: 0.6, top_k: 20, top_p: 0.95 }, {});

  test("nothing, and nothing configured, is greedy", () => {
    expect(withDefaults({}, plain).temperature).toBe(0);
  });

  test("nothing, and a model that samples, is that model's sampling", () => {
    expect(withDefaults({}, chatty)).toEqual({
      temperature: 0.6,
      top_k: 20,
      top_p: 0.95,
      min_p: 0,
      repetition_penalty: 1,
    });
  });

  test("a temperature alone is top-50 sampling, as transformers has it", () => {
    expect(withDefaults({ temperature: 0.8 }, plain)).toMatchObject({ temperature: 0.8, top_k: 50, top_p: 1 });
  });

  test("temperature 0 is greedy, and top_k 0 is all tokens, whatever the model says", () => {
    expect(withDefaults({ temperature: 0 }, chatty).temperature).toBe(0);
    expect(withDefaults({ top_k: 0 }, chatty)).toMatchObject({ temperature: 0.6, top_k: 0 });
  });

  test("a filter without a temperature asks for drawing", () => {
    expect(withDefaults({ top_p: 0.5 }, plain)).toMatchObject({ temperature: 1, top_p: 0.5 });
  });
});
