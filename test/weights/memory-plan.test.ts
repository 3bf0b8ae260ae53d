import { afterAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { readModel, type StageOptions } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { type MemoryCategory, memoryPlan } from "../../src/weights/memory-plan.ts";
import { planLoad } from "../../src/weights/plan.ts";
import { decoderTensors, writeEmptyCheckpoint } from "../support/empty-checkpoint.ts";
import { GPT2_124M, GPT2_XL, type Gpt2Shape, writeEmptyGpt2 } from "../support/empty-gpt2.ts";
import { temporaryFolder } from "../support/safetensors.ts";

// The sums are written out as on paper, from the shapes in the models' descriptions, and share no code with the planner:
// bfloat16 has 2 bytes, float32 and words of tables have 4.

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

interface Sum {
  readonly name: string;
  readonly options: Partial<StageOptions> & { readonly layers: readonly [start: number, end: number] };
  /** Bytes of each category, and of the row whose detail says so. */
  readonly categories?: Partial<Record<MemoryCategory, number>>;
  readonly rows?: Record<string, number>;
}

interface Model {
  readonly name: string;
  readonly write: (directory: string) => string;
  readonly sums: readonly Sum[];
}

const gpt2 = (shape: Gpt2Shape) => (directory: string) => writeEmptyGpt2(directory, shape);

/** meta-llama/Meta-Llama-3-70B, by its config.json. */
const writeLlama70B = (directory: string): string => {
  const config = {
    model_type: "llama",
    hidden_size: 8192,
    intermediate_size: 28672,
    num_hidden_layers: 80,
    num_attention_heads: 64,
    num_key_value_heads: 8,
    vocab_size: 128256,
    max_position_embeddings: 8192,
    rms_norm_eps: 1e-5,
    rope_theta: 500000,
  };
  const sizes = { hidden: 8192, inner: 28672, layers: 80, heads: 64, kvHeads: 8, headDim: 128, vocab: 128256 };
  return writeEmptyCheckpoint(directory, config, decoderTensors(sizes));
};

/** Numbers of a layer of GPT-2: c_attn, c_proj, c_fc, c_proj; biases of these, and two norms. */
const MATRICES_124M = 768 * 2304 + 768 * 768 + 768 * 3072 + 3072 * 768; // 7,077,888
const VECTORS_124M = 2304 + 768 + 3072 + 768 + 4 * 768; // 9,984
const MATRICES_XL = 1600 * 4800 + 1600 * 1600 + 1600 * 6400 + 6400 * 1600; // 30,720,000
/** Numbers of a layer of Llama 3 70B: q and o, k and v of 8 heads of 128, gate, up and down. */
const MATRICES_70B = 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672; // 855,638,016
const VECTORS_XL = 4800 + 1600 + 6400 + 1600 + 4 * 1600; // 20,800
/** 64 rows of the head, which is how many of 50,257 float32 logits stay below 16 MiB: 201,028 bytes each. */
const LOGIT_ROWS = 64;
const MIB = 1_048_576;

const MODELS: readonly Model[] = [
  {
    name: "GPT-2 (124M)",
    write: gpt2(GPT2_124M),
    sums: [
      {
        name: "whole, in bfloat16, with room for four sequences",
        options: { layers: [0, 12], maxContext: 1024, maxSessions: 4 },
        categories: {
          weights:
            2 * (50257 * 768 + 1024 * 768) + // wte, which is the head too, and wpe: 78,767,616
            12 * (2 * MATRICES_124M + 4 * VECTORS_124M) + // 170,348,544
            4 * 2 * 768, // ln_f
          "kv cache": 12 * 4 * 1024 * 2 * 768 * 2, // layers, sequences, tokens, keys and values: 144 MiB
        },
        rows: {
          "embeddings and head, bfloat16": 77_194_752,
          "layers 0-12, bfloat16": 169_869_312,
          "layers 0-12, vectors in float32": 479_232,
          // Of 512 tokens: stream, normed, attended and projected of 768, qkv of 2304, inner of 3072; of 64 single tokens
          // 12 heads × 32 chunks of 32 keys × (64 values, a maximum, a sum); tables of 2, 1 and 4 words for a token and
          // one for each of 128 pages; 8 float32 zeros for what is not there.
          "passes of up to 512 tokens":
            512 * 4 * (4 * 768 + 2304 + 3072) + 64 * 12 * 32 * 66 * 4 + 512 * 4 * (2 + 1 + 4) + 128 * 4 + 8 * 4,
          // The head's rows, padded to 50,264, what it reads, which rows these are (up to 1024), what it chose.
          logits: 4 * LOGIT_ROWS * 50264 + 4 * LOGIT_ROWS * 768 + 4 * 1024 + 4 * LOGIT_ROWS,
          // Pieces of weights; 64 rows of bfloat16 logits, which are more than 512 × 768 hidden states.
          "weights, hidden states and logits on their way in and out": 8 * MIB + 2 * LOGIT_ROWS * 50257,
          // 2048 slots of 256 bytes, and what reads those logits back.
          "parameters of kernels, and results on their way out": 2048 * 256 + 2 * LOGIT_ROWS * 50257,
        },
      },
      {
        name: "the head's half, in nf4, with one sequence",
        options: { layers: [0, 6], maxContext: 1024, maxSessions: 1, encoding: "nf4" },
        categories: { "kv cache": 6 * 1 * 1024 * 2 * 768 * 2 },
        rows: {
          "embeddings, bfloat16": 2 * (50257 * 768 + 1024 * 768), // not quantized, and no head here
          "layers 0-6, nf4": 6 * (MATRICES_124M / 2 + (MATRICES_124M / 64) * 4), // half a byte, and 4 for each 64
          "layers 0-6, vectors in float32": 6 * 4 * VECTORS_124M,
          "the largest matrix in bfloat16, while it is quantized": 2 * 768 * 3072,
        },
      },
      {
        name: "the tail's half, in int8, with a short context",
        options: { layers: [6, 12], maxContext: 100, maxSessions: 3, encoding: "int8" },
        // Pages of 32 tokens: 100 tokens take four of them.
        categories: { "kv cache": 6 * 3 * 128 * 2 * 768 * 2 },
        rows: {
          "head, bfloat16": 2 * 50257 * 768,
          "layers 6-12, int8": 6 * (MATRICES_124M + 4 * (2304 + 768 + 3072 + 768)), // a byte, and 4 for each output
          "final norm in float32": 2 * 768 * 4,
          // And the scale by which each output is divided.
          "the largest matrix in bfloat16, while it is quantized": 2 * 768 * 3072 + 4 * 3072,
        },
      },
      {
        name: "layers from the middle",
        options: { layers: [4, 8], maxContext: 256, maxSessions: 1 },
        categories: {
          weights: 4 * (2 * MATRICES_124M + 4 * VECTORS_124M),
          "kv cache": 4 * 256 * 2 * 768 * 2,
        },
      },
    ],
  },
  {
    name: "GPT-2 XL",
    write: gpt2(GPT2_XL),
    sums: [
      {
        name: "whole, in bfloat16, with room for four sequences",
        options: { layers: [0, 48], maxContext: 1024, maxSessions: 4 },
        categories: {
          weights: 2 * (50257 * 1600 + 1024 * 1600) + 48 * (2 * MATRICES_XL + 4 * VECTORS_XL) + 4 * 2 * 1600,
          "kv cache": 48 * 4 * 1024 * 2 * 1600 * 2, // 1.17 GiB
        },
        rows: { "layers 0-48, bfloat16": 2_949_120_000 },
      },
      {
        name: "layers from the middle, in nf4",
        options: { layers: [10, 20], maxContext: 512, maxSessions: 2, encoding: "nf4" },
        categories: { "kv cache": 10 * 2 * 512 * 2 * 1600 * 2 },
        rows: {
          "layers 10-20, nf4": 10 * (MATRICES_XL / 2 + (MATRICES_XL / 64) * 4),
          "layers 10-20, vectors in float32": 10 * 4 * VECTORS_XL,
        },
      },
    ],
  },
  {
    name: "Llama 3 70B",
    write: writeLlama70B,
    sums: [
      {
        name: "whole, in bfloat16, with one sequence",
        options: { layers: [0, 80], maxContext: 8192, maxSessions: 1 },
        categories: {
          weights: 2 * 2 * 128256 * 8192 + 80 * (2 * MATRICES_70B + 4 * 2 * 8192) + 4 * 8192, // 141.1 GB
          "kv cache": 80 * 8192 * 2 * 1024 * 2, // 2.5 GiB
        },
        rows: {
          "embeddings, bfloat16": 2_101_346_304,
          "head, bfloat16": 2_101_346_304,
          "layers 0-80, bfloat16": 136_902_082_560,
        },
      },
      {
        name: "the first quarter, in nf4, with four sequences",
        options: { layers: [0, 20], maxContext: 4096, maxSessions: 4, encoding: "nf4" },
        categories: { "kv cache": 20 * 4 * 4096 * 2 * 1024 * 2 },
        rows: {
          "layers 0-20, nf4": 20 * (MATRICES_70B / 2 + (MATRICES_70B / 64) * 4), // 9.6 GB
          "layers 0-20, vectors in float32": 20 * 4 * 2 * 8192,
          "the largest matrix in bfloat16, while it is quantized": 2 * 8192 * 28672,
        },
      },
    ],
  },
];

describe.each(MODELS)("the plan of $name is the sum on paper:", ({ name, write, sums }) => {
  const directory = write(join(folder.path, name.replaceAll(/\W/g, "-")));
  const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const checkpoint = openCheckpoint(directory);

  test.each([...sums])("$name", ({ options: { layers, ...rest }, categories = {}, rows = {} }) => {
    const span = { start: layers[0], end: layers[1], total: config.layers };
    const options = { maxContext: config.maxPositions, maxSessions: 1, encoding: "bf16" as const, ...rest, span };
    const plan = memoryPlan(planLoad(family, config, options, checkpoint));
    const total = (list: typeof plan.rows) => list.reduce((sum, { bytes }) => sum + bytes, 0);
    for (const [category, bytes] of Object.entries(categories))
      expect([category, total(plan.rows.filter((row) => row.category === category))]).toEqual([category, bytes]);
    for (const [detail, bytes] of Object.entries(rows))
      expect([detail, total(plan.rows.filter((row) => row.detail === detail))]).toEqual([detail, bytes]);
    const lasting = plan.rows.filter(({ category }) => category !== "loading");
    expect([plan.plannedBytes, plan.peakBytes]).toEqual([total(lasting), total(plan.rows)]);
  });
});
