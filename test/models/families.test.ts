import { describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import type { DecoderConfig } from "../../src/models/decoder.ts";
import { readModel } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { planLoad, unexpectedNames } from "../../src/weights/plan.ts";
import { FIXTURES } from "../support/oracle.ts";

const config = (model_type: string, keys: Record<string, unknown> = {}) =>
  readModel({ model_type, ...keys }).config as DecoderConfig;

describe("what a config.json leaves out is the family's own:", () => {
  test.each([
    ["llama", { layers: 32, kvHeads: 32, headDim: 128, innerSize: 11008, maxPositions: 2048, norm: { eps: 1e-6 } }],
    ["mistral", { layers: 32, kvHeads: 8, headDim: 128, innerSize: 14336, vocabSize: 32000 }],
    ["qwen2", { kvHeads: 32, headDim: 128, vocabSize: 151936, bias: { qkv: true, output: false, mlp: false } }],
    ["qwen3", { kvHeads: 32, headDim: 128, qkNorm: true, bias: { qkv: false, output: false } }],
    ["gemma", { layers: 28, heads: 16, kvHeads: 16, headDim: 256, activation: "gelu_tanh", tieWordEmbeddings: true }],
    ["gemma2", { layers: 26, heads: 8, kvHeads: 4, headDim: 256, attentionSoftcap: 50, logitSoftcap: 30 }],
    ["gemma3_text", { heads: 8, kvHeads: 4, headDim: 256, vocabSize: 262208, maxPositions: 131072, qkNorm: true }],
    ["gemma3", { heads: 8, kvHeads: 4, headDim: 256, vocabSize: 262208, tieWordEmbeddings: true }],
    ["phi3", { kvHeads: 32, headDim: 96, norm: { eps: 1e-5, offset: 0 }, tieWordEmbeddings: false }],
    ["gpt_neox", { heads: 64, headDim: 96, activation: "gelu_erf", parallel: true, rope: { rotated: 24, theta: 1e4 } }],
  ])("%s", (modelType, expected) => {
    expect(config(modelType)).toMatchObject({ modelType, ...expected });
  });

  test("the sizes of heads: qwen3 and the gemmas have their own, others share out the hidden size", () => {
    const sizes = { hidden_size: 1024, num_attention_heads: 16, num_key_value_heads: 8 };
    const headDims = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"].map(
      (modelType) => config(modelType, sizes).headDim,
    );
    expect(headDims).toEqual([64, 64, 64, 128, 256, 256, 256, 64]);
    expect(config("qwen3", { ...sizes, head_dim: 40 }).headDim).toBe(40);
  });
});

describe("null and missing are two things:", () => {
  test("num_key_value_heads: null means as many as heads, in every family; missing is the family's", () => {
    for (const [modelType, missing] of [
      ["llama", 16],
      ["mistral", 8],
      ["phi3", 16],
      ["gemma2", 4],
    ] as const) {
      const sizes = { hidden_size: 1024, num_attention_heads: 16 };
      expect([modelType, config(modelType, sizes).kvHeads]).toEqual([modelType, missing]);
      expect(config(modelType, { ...sizes, num_key_value_heads: null }).kvHeads).toBe(16);
    }
  });

  test("sliding_window: Mistral's is 4096 where it is missing, and null means none", () => {
    expect(config("mistral").layerTypes[0]).toEqual({ rope: "all", window: 4096 });
    expect(config("mistral", { sliding_window: null }).layerTypes[0]).toEqual({ rope: "all", window: undefined });
    expect(config("phi3").layerTypes[0]).toEqual({ rope: "all", window: undefined });
    expect(config("phi3", { sliding_window: 2047 }).layerTypes[0]).toEqual({ rope: "all", window: 2047 });
  });

  test("the soft caps: Gemma 2's are there where they are missing, and null means none", () => {
    const none = { attn_logit_softcapping: null, final_logit_softcapping: null };
    expect(config("gemma2", none)).toMatchObject({ attentionSoftcap: undefined, logitSoftcap: undefined });
    expect(config("gemma3_text")).not.toHaveProperty("attentionSoftcap");
    expect(config("gemma3_text", { attn_logit_softcapping: 50 })).not.toHaveProperty("attentionSoftcap");
    expect(config("gemma3_text", { final_logit_softcapping: 30 })).toMatchObject({ logitSoftcap: 30 });
  });
});

describe("which layers see only a window", () => {
  const windows = (modelType: string, keys: Record<string, unknown>) =>
    config(modelType, { num_hidden_layers: 6, ...keys }).layerTypes.map(({ window }) => window ?? 0);

  test.each([
    ["mistral", { sliding_window: 9 }, [9, 9, 9, 9, 9, 9]],
    ["ministral", { sliding_window: 9 }, [9, 9, 9, 9, 9, 9]],
    ["qwen2", { sliding_window: 9, max_window_layers: 0 }, [0, 0, 0, 0, 0, 0]], // not used
    ["qwen2", { use_sliding_window: true, sliding_window: 9, max_window_layers: 4 }, [0, 0, 0, 0, 9, 9]],
    ["qwen3", { use_sliding_window: true, sliding_window: 9, max_window_layers: 2 }, [0, 0, 9, 9, 9, 9]],
    ["qwen3", { use_sliding_window: true, max_window_layers: 4 }, [0, 0, 0, 0, 4096, 4096]],
    ["gemma2", { sliding_window: 9 }, [9, 0, 9, 0, 9, 0]],
    ["gemma3_text", { sliding_window: 9 }, [9, 9, 9, 9, 9, 0]],
    ["gemma3_text", { sliding_window: 9, sliding_window_pattern: 2 }, [9, 0, 9, 0, 9, 0]],
  ])("of %s with %j", (modelType, keys, expected) => {
    expect(windows(modelType, keys)).toEqual(expected);
  });

  test.each(["mistral", "ministral", "qwen2", "qwen3", "gemma2", "gemma3_text"])(
    "of %s is what layer_types says, where it says so",
    (type) => {
      const [full, sliding] = ["full_attention", "sliding_attention"];
      const layer_types = [full, sliding, sliding, full, full, sliding];
      const keys = { use_sliding_window: true, sliding_window: 9, max_window_layers: 0, layer_types };
      expect(windows(type, keys)).toEqual([0, 9, 9, 0, 0, 9]);
    },
  );

  test.each([
    ["qwen2", {}],
    ["qwen3", { use_sliding_window: false, sliding_window: 9 }],
    ["qwen2_moe", {}],
    ["mistral", { sliding_window: null }],
    ["gemma2", { sliding_window: null }],
  ])("of %s with %j cannot be one that has none", (type, keys) => {
    const layer_types = Array.from({ length: 6 }, () => "sliding_attention");
    expect(() => windows(type, { layer_types, ...keys })).toThrow(
      /layer 0 is of the type "sliding_attention".*no window/,
    );
  });

  test("in Gemma 3 decides which rope turns them", () => {
    const ropes = config("gemma3_text", { num_hidden_layers: 6 }).layerTypes.map(({ rope }) => rope);
    expect(ropes).toEqual(["sliding", "sliding", "sliding", "sliding", "sliding", "full"]);
  });
});

test.each([
  [2048, 45.25],
  [2304, 48],
  [2560, 50.5],
  [3072, 55.5],
  [3584, 59.75],
  [3840, 62],
  [5376, 73.5],
])("Gemma's embedding of %d columns is multiplied by √columns in bfloat16: %d", (hidden_size, expected) => {
  for (const modelType of ["gemma", "gemma2", "gemma3_text"])
    expect(config(modelType, { hidden_size }).embedScale).toBe(expected);
});

test("Gemma's scores are scaled by query_pre_attn_scalar from Gemma 2 on, by the head's size before", () => {
  expect(config("gemma", { query_pre_attn_scalar: 144 }).attentionScale).toBe(256 ** -0.5);
  for (const modelType of ["gemma2", "gemma3_text"])
    expect(config(modelType, { query_pre_attn_scalar: 144 }).attentionScale).toBe(144 ** -0.5);
});

test("an activation is read under the family's own key", () => {
  expect(config("gemma", { hidden_act: "gelu" }).activation).toBe("gelu_tanh");
  for (const modelType of ["gemma2", "gemma3_text"]) {
    expect(config(modelType, { hidden_act: "relu" }).activation).toBe("gelu_tanh");
    expect(config(modelType, { hidden_activation: "gelu" }).activation).toBe("gelu_erf");
  }
  for (const modelType of ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox"])
    expect(config(modelType, { hidden_act: "gelu" }).activation).toBe("gelu_erf");
});

describe("a config.json that cannot be is refused by name:", () => {
  test.each([
    [{ model_type: "granite" }, /"granite".*known are gpt2, gpt_neox, llama/],
    [{ model_type: "cohere" }, /"cohere"/],
    [{ model_type: "llama", num_attention_heads: 6, num_key_value_heads: 4 }, /heads 6.*key_value_heads 4/],
    [{ model_type: "llama", head_dim: 512 }, /512 dimensions.*1 to 256/],
    [{ model_type: "llama", hidden_act: "xielu" }, /hidden_act "xielu"/],
    [{ model_type: "llama", rms_norm_eps: 0 }, /"rms_norm_eps" is 0/],
    [{ model_type: "qwen2", layer_types: ["full_attention"] }, /"layer_types".*32 strings/],
    [
      { model_type: "gemma2", num_hidden_layers: 1, layer_types: ["chunked_attention"] },
      /layer 0.*"chunked_attention"/,
    ],
    [{ model_type: "gemma3_text", use_bidirectional_attention: true }, /use_bidirectional_attention/],
    [{ model_type: "gemma3", text_config: [] }, /"text_config" is \[\]/],
    [
      { model_type: "gemma3", text_config: { num_hidden_layers: 0 } },
      /config.json: text_config: "num_hidden_layers" is 0/,
    ],
    [{ model_type: "gpt_neox", hidden_size: 100, num_attention_heads: 3 }, /hidden_size 100.*heads 3/],
  ])("%j", (json, says) => {
    let error: unknown;
    try {
      readModel(json);
    } catch (thrown) {
      error = thrown;
    }
    expect(error).toBeInstanceOf(UserError);
    expect(`${(error as UserError).message}; ${(error as UserError).hint}`).toMatch(says);
  });
});

const FAMILIES = readdirSync(join(FIXTURES, "families"), { withFileTypes: true })
  .filter((entry) => entry.isDirectory())
  .map(({ name }) => name);

describe.each(FAMILIES)("of the checkpoint %s", (name) => {
  const directory = join(FIXTURES, "families", name);
  const json = JSON.parse(readFileSync(join(directory, "config.json"), "utf8"));
  const { family, config } = readModel(json);
  const checkpoint = openCheckpoint(directory);
  const optionsOf = (start: number, end: number) => ({
    span: { start, end, total: config.layers },
    maxContext: 16,
    maxSessions: 1,
    encoding: "bf16" as const,
  });
  const namesOf = (start: number, end: number) =>
    planLoad(family, config, optionsOf(start, end), checkpoint).sources.map(({ name }) => name);

  test("a node with all layers needs every tensor but those that no one needs", () => {
    const needed = new Set(namesOf(0, config.layers));
    const others = [...checkpoint.tensors.keys()].filter((tensor) => !needed.has(tensor));
    const ofFurtherLayers = new RegExp(`layers\\.${config.layers}\\.`);
    const isIgnored = (tensor: string) =>
      family.ignored.test(tensor) || (family.mayHaveMoreLayers && ofFurtherLayers.test(tensor));
    expect(others.filter((tensor) => !isIgnored(tensor))).toEqual([]);
    expect(unexpectedNames(family, config, optionsOf(0, 1), checkpoint)).toEqual([]);
  });

  test("a span needs its own layers, by their global numbers, and what its ends need", () => {
    const last = config.layers - 1;
    const ofLayer = (tensor: string) => /layers\.(\d+)\./.exec(tensor)?.[1];
    const layersOf = (names: string[]) => [...new Set(names.map(ofLayer).filter((layer) => layer !== undefined))];
    expect(layersOf(namesOf(last, last + 1))).toEqual([`${last}`]);
    expect(layersOf(namesOf(0, 1))).toEqual(["0"]);
    const embeds = (names: string[]) => names.some((tensor) => /embed_(tokens|in)\.weight$/.test(tensor));
    const heads = (names: string[]) => names.some((tensor) => /(lm_head|embed_out)\.weight$/.test(tensor));
    expect([embeds(namesOf(0, 1)), heads(namesOf(0, 1))]).toEqual([true, false]);
    // Tied, the tail multiplies by the embedding.
    const { tieWordEmbeddings: tied } = config;
    expect([embeds(namesOf(last, last + 1)), heads(namesOf(last, last + 1))]).toEqual([tied, !tied]);
  });
});
