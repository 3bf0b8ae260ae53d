import { describe, expect, test } from "bun:test";
import type { MixtureConfig } from "../../src/models/experts.ts";
import { readModel, readQuantization } from "../../src/models/index.ts";

const config = (model_type: string, keys: Record<string, unknown> = {}) =>
  readModel({ model_type, ...keys }).config as MixtureConfig;

describe("what a config.json leaves out is the family's own:", () => {
  test.each([
    ["mixtral", { experts: 8, chosen: 2, innerSize: 14336, route: { score: "softmax", normalize: true, scale: 1 } }],
    ["qwen2_moe", { experts: 60, chosen: 4, innerSize: 1408, route: { score: "softmax", normalize: false, scale: 1 } }],
    ["qwen2_moe", { shared: { innerSize: 5632, isGated: true } }],
    ["qwen3_moe", { experts: 128, chosen: 8, innerSize: 768, route: { score: "softmax", normalize: false, scale: 1 } }],
    ["deepseek_v3", { experts: 256, chosen: 8, innerSize: 2048, shared: { innerSize: 2048, isGated: false } }],
    [
      "deepseek_v3",
      { route: { score: "sigmoid", normalize: true, scale: 2.5, groups: { count: 8, chosen: 4, best: 2 } } },
    ],
  ])("%s", (modelType, mixture) => {
    expect(config(modelType).mixture).toMatchObject(mixture);
  });

  test("deepseek_v2 does not say how many experts a token takes: its file must", () => {
    expect(() => config("deepseek_v2")).toThrow(/config\.json has no "num_experts_per_tok"/);
    const { mixture } = config("deepseek_v2", { num_experts_per_tok: 6 });
    expect(mixture).toMatchObject({ experts: 64, chosen: 6, innerSize: 1407, shared: { innerSize: 2814 } });
    expect(mixture.route).toEqual({ score: "softmax", normalize: false, scale: 1 });
  });

  test("the rest of Mixtral: θ of a million, no window, an epsilon of 1e-5", () => {
    expect(config("mixtral")).toMatchObject({ norm: { eps: 1e-5 }, ropes: { all: { theta: 1e6 } }, kvHeads: 8 });
    expect(config("mixtral").layerTypes[0]).toEqual({ rope: "all", window: undefined });
  });
});

describe("which layers have experts", () => {
  const sparse = (modelType: string, keys: Record<string, unknown>) =>
    config(modelType, { num_hidden_layers: 6, ...keys }).mixture.isSparse.map(Number);

  test.each([
    ["mixtral", {}, [1, 1, 1, 1, 1, 1]],
    ["qwen2_moe", { decoder_sparse_step: 2 }, [0, 1, 0, 1, 0, 1]],
    ["qwen3_moe", { decoder_sparse_step: 3, mlp_only_layers: [2, 3] }, [0, 0, 0, 0, 0, 1]],
    ["qwen3_moe", { mlp_only_layers: null }, [1, 1, 1, 1, 1, 1]],
    ["deepseek_v3", {}, [0, 0, 0, 1, 1, 1]],
    ["deepseek_v2", { num_experts_per_tok: 2 }, [1, 1, 1, 1, 1, 1]],
    ["deepseek_v2", { num_experts_per_tok: 2, first_k_dense_replace: 5 }, [0, 0, 0, 0, 0, 1]],
  ])("of %s with %j", (modelType, keys, expected) => {
    expect(sparse(modelType, keys)).toEqual(expected);
  });
});

describe("which layers see only a window", () => {
  const windows = (modelType: string, keys: Record<string, unknown>) =>
    config(modelType, { num_hidden_layers: 5, sliding_window: 9, ...keys }).layerTypes.map(({ window }) => window ?? 0);

  test.each([
    ["mixtral", {}, [9, 9, 9, 9, 9]],
    ["qwen2_moe", {}, [0, 0, 0, 0, 0]], // not used
    ["qwen2_moe", { use_sliding_window: true }, [9, 0, 9, 0, 9]],
    ["qwen2_moe", { use_sliding_window: true, max_window_layers: 3 }, [9, 0, 9, 0, 0]],
    ["qwen3_moe", {}, [0, 0, 0, 0, 0]],
    ["qwen3_moe", { use_sliding_window: true, max_window_layers: 3 }, [9, 9, 9, 9, 9]],
  ])("of %s with %j", (modelType, keys, expected) => {
    expect(windows(modelType, keys)).toEqual(expected);
  });
});

describe("scores of DeepSeek are scaled", () => {
  const scale = (keys: Record<string, unknown>) => config("deepseek_v3", keys).attentionScale;
  const yarn = { type: "yarn", factor: 40, original_max_position_embeddings: 4096 };

  test("by the whole head, and by m² where positions are scaled and the file gives mscale_all_dim", () => {
    expect(scale({})).toBe(192 ** -0.5);
    expect(scale({ rope_scaling: yarn })).toBe(192 ** -0.5);
    expect(scale({ rope_scaling: { ...yarn, mscale: 1, mscale_all_dim: 0 } })).toBe(192 ** -0.5);
    expect(scale({ rope_scaling: { ...yarn, mscale: 1, mscale_all_dim: 1 } })).toBeCloseTo(0.1352338, 7);
  });
});

describe("what would be guessed is refused by name:", () => {
  test.each([
    ["deepseek_v2", { topk_method: "noaux_tc" }, /topk_method "noaux_tc".*deepseek_v2/],
    ["deepseek_v2", { scoring_func: "sigmoid" }, /scoring_func is "sigmoid"/],
    ["deepseek_v3", { topk_method: "greedy" }, /topk_method is "greedy"/],
    ["deepseek_v3", { scoring_func: "softmax" }, /scoring_func is "softmax"/],
    ["deepseek_v3", { moe_layer_freq: 2 }, /moe_layer_freq is 2/],
    ["deepseek_v3", { hidden_act: "mish" }, /"mish"/],
    ["deepseek_v3", { n_group: 7 }, /256 experts cannot be in 7 groups/],
    ["deepseek_v3", { n_group: 256 }, /256 experts cannot be in 256 groups of at least 2/],
    ["deepseek_v3", { n_group: 128, topk_group: 3 }, /8 experts cannot be chosen from 3 of 128 groups/],
    ["deepseek_v3", { topk_group: 9 }, /from 9 of 8 groups/],
    ["deepseek_v3", { kv_lora_rank: 2048 }, /2112 dimensions, and meshnet takes up to 768/],
    ["mixtral", { num_experts_per_tok: 9 }, /num_experts_per_tok 9 is more than num_local_experts 8/],
    ["mixtral", { num_local_experts: 5000 }, /"num_local_experts" is 5000.*1024/],
    ["qwen2_moe", { mlp_only_layers: "all" }, /"mlp_only_layers" is "all"/],
  ])("%s with %j", (modelType, keys, message) => {
    expect(() => config(modelType, { num_experts_per_tok: modelType === "mixtral" ? 2 : 8, ...keys })).toThrow(message);
  });

  test("FP8 of another block size", () => {
    const of = (weight_block_size: unknown) =>
      readQuantization({ quantization_config: { quant_method: "fp8", weight_block_size } });
    expect(of([128, 128])).toBeUndefined();
    expect(() => of([64, 64])).toThrow(/quant_method "fp8" with a weight_block_size of \[64,64\]/);
    expect(of(undefined)).toBeUndefined(); // transformers' default
    expect(() => of(null)).toThrow(/weight_block_size of null/); // one factor for all of a weight
  });

  test.each([
    ["fp8", /"quantization_config" is "fp8", and it can be an object/],
    [[4], /"quantization_config" is \[4\], and it can be an object/],
    [{ bits: 4 }, /quantization_config has no quant_method/],
    [{ quant_method: "gptq" }, /quantization_config has the quant_method "gptq"/],
  ])("a quantization that is %j", (quantization_config, message) => {
    expect(() => readQuantization({ quantization_config })).toThrow(message);
  });
});
