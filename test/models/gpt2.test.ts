import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { UserError } from "../../src/base/errors.ts";
import { readModel } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { neededNames, planLoad } from "../../src/weights/plan.ts";
import { TINY, variant } from "../support/oracle.ts";

const config = (keys: Record<string, unknown> = {}) => readModel({ model_type: "gpt2", ...keys }).config;

test("a GPT-2 whose config.json leaves everything out is the 124M one of transformers", () => {
  expect(config()).toMatchObject({
    vocabSize: 50257,
    hiddenSize: 768,
    innerSize: 3072,
    layers: 12,
    heads: 12,
    headDim: 64,
    maxPositions: 1024,
    tieWordEmbeddings: true,
    activation: "gelu_tanh",
    eps: 1e-5,
    scaleByHeadDim: true,
    scaleByLayer: false,
  });
});

test.each([
  ["gelu_new", "gelu_tanh"],
  ["gelu_pytorch_tanh", "gelu_tanh"],
  ["gelu_fast", "gelu_tanh"],
  ["gelu", "gelu_erf"], // an eighth of bfloat16's noise apart from gelu_new: the oracle could not tell
  ["quick_gelu", "quick_gelu"],
  ["silu", "silu"],
  ["swish", "silu"],
  ["relu", "relu"],
])("the activation that config.json calls %s is %s", (name, expected) => {
  expect(config({ activation_function: name })).toMatchObject({ activation: expected });
});

test("n_inner: null means four times the hidden size, and a number means that", () => {
  expect(config({ n_embd: 96, n_inner: null })).toMatchObject({ innerSize: 384 });
  expect(config({ n_embd: 96, n_inner: 100 })).toMatchObject({ innerSize: 100 });
});

describe("a config.json that cannot be is refused by name:", () => {
  test.each([
    [{ model_type: "bert" }, /model_type "bert"/],
    [{ model_type: "gpt2", n_embd: 100, n_head: 12 }, /n_embd 100.*n_head 12/],
    [{ model_type: "gpt2", n_layer: 0 }, /"n_layer" is 0/],
    [{ model_type: "gpt2", n_layer: null }, /"n_layer" is null/],
    [{ model_type: "gpt2", layer_norm_epsilon: "1e-5" }, /"layer_norm_epsilon"/],
    [{ model_type: "gpt2", activation_function: "toString" }, /toString/],
    [{}, /no "model_type"/],
  ])("%p", (json, says) => {
    expect(() => readModel(json)).toThrow(UserError);
    expect(() => readModel(json)).toThrow(says);
  });
});

describe("a span needs", () => {
  const { family, config: tiny } = readModel({
    model_type: "gpt2",
    n_embd: 96,
    n_layer: 4,
    n_head: 4,
    n_positions: 256,
    vocab_size: 1024,
  });
  const planOf = (start: number, end: number, directory = TINY) =>
    planLoad(
      family,
      tiny,
      { span: { start, end, total: 4 }, maxContext: 256, maxSessions: 1, encoding: "bf16" },
      openCheckpoint(directory),
    );
  const namesOf = (start: number, end: number) => planOf(start, end).weights.map(({ source }) => source.name);
  const layer = (index: number) =>
    ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"].flatMap((module) =>
      ["weight", "bias"].map((part) => `h.${index}.${module}.${part}`),
    );

  test("its own layers, with their biases and without their causal masks", () => {
    expect(namesOf(1, 3).toSorted()).toEqual([...layer(1), ...layer(2)].toSorted());
  });

  test("both embeddings where it is the head", () => {
    expect(namesOf(0, 1).toSorted()).toEqual([...layer(0), "wte.weight", "wpe.weight"].toSorted());
  });

  test("the final norm and the tied head where it is the tail", () => {
    expect(namesOf(3, 4).toSorted()).toEqual([...layer(3), "ln_f.weight", "ln_f.bias", "wte.weight"].toSorted());
  });

  test("the tied matrix once where it is both", () => {
    const whole = namesOf(0, 4);
    expect(whole.filter((name) => name === "wte.weight")).toHaveLength(1);
    expect(new Set(whole).size).toBe(whole.length);
  });

  test("nothing that a checkpoint under either prefix would not be asked for", () => {
    const names = neededNames(family, tiny, {
      span: { start: 1, end: 2, total: 4 },
      maxContext: 256,
      maxSessions: 1,
      encoding: "bf16",
    });
    expect(names.has("h.1.attn.c_attn.bias")).toBe(true);
    expect(names.has("transformer.h.1.attn.c_attn.bias")).toBe(true);
    expect(names.has("h.1.attn.bias")).toBe(false);
    expect(names.has("h.0.attn.c_attn.bias")).toBe(false);
  });

  test("a head of its own where the model is not tied", () => {
    const { family: gpt2, config: untied } = readModel(
      JSON.parse(readFileSync(`${variant("untied")}/config.json`, "utf8")),
    );
    const options = { span: { start: 1, end: 2, total: 2 }, maxContext: 32, maxSessions: 1, encoding: "bf16" as const };
    const plan = planLoad(gpt2, untied, options, openCheckpoint(variant("untied")));
    const names = plan.weights.map(({ source }) => source.name);
    expect(names).toContain("lm_head.weight");
    expect(names).not.toContain("wte.weight");
  });
});
