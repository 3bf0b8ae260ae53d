import { afterAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { readModel, type StageOptions } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { memoryPlan } from "../../src/weights/memory-plan.ts";
import { planLoad } from "../../src/weights/plan.ts";
import { type DecoderSizes, decoderTensors, type Sized, writeEmptyCheckpoint } from "../support/empty-checkpoint.ts";
import { temporaryFolder } from "../support/safetensors.ts";

// Models of 4 to 73 billion parameters, by their config.json alone: the checkpoints are headers over holes. `parameters` is
// the number that their publishers state, and the sums are written out as on paper.

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

interface RealModel {
  name: string;
  config: Record<string, unknown>;
  sizes: DecoderSizes;
  tensors?: Parameters<typeof decoderTensors>[1];
  /** Of all layers, the embedding counted once where it is the head too. */
  parameters: number;
  /** Positions that the model knows. */
  context: number;
}

const MODELS: RealModel[] = [
  {
    name: "Llama-3-70B",
    config: {
      model_type: "llama",
      max_position_embeddings: 8192,
      rms_norm_eps: 1e-5,
      rope_theta: 500000,
    },
    sizes: { hidden: 8192, inner: 28672, layers: 80, heads: 64, kvHeads: 8, headDim: 128, vocab: 128256 },
    parameters: 70_553_706_496,
    context: 8192,
  },
  {
    name: "Mistral-7B-v0.1",
    config: { model_type: "mistral", max_position_embeddings: 32768, rms_norm_eps: 1e-5, sliding_window: 4096 },
    sizes: { hidden: 4096, inner: 14336, layers: 32, heads: 32, kvHeads: 8, headDim: 128, vocab: 32000 },
    parameters: 7_241_732_096,
    context: 32768,
  },
  {
    name: "Qwen2.5-72B",
    config: {
      model_type: "qwen2",
      max_position_embeddings: 131072,
      max_window_layers: 80,
      rope_theta: 1e6,
      sliding_window: 131072,
      use_sliding_window: false,
    },
    sizes: { hidden: 8192, inner: 29568, layers: 80, heads: 64, kvHeads: 8, headDim: 128, vocab: 152064 },
    tensors: { qkvBias: true },
    parameters: 72_706_203_648,
    context: 131072,
  },
  {
    name: "Gemma-2-27B",
    config: { model_type: "gemma2", head_dim: 128, query_pre_attn_scalar: 144, sliding_window: 4096 },
    sizes: { hidden: 4608, inner: 36864, layers: 46, heads: 32, kvHeads: 16, headDim: 128, vocab: 256000 },
    tensors: {
      tied: true,
      norms: ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"],
    },
    parameters: 27_227_128_320,
    context: 8192,
  },
  {
    name: "Phi-3-mini-4k",
    config: { model_type: "phi3", max_position_embeddings: 4096, sliding_window: 2047, rope_scaling: null },
    sizes: { hidden: 3072, inner: 8192, layers: 32, heads: 32, kvHeads: 32, headDim: 96, vocab: 32064 },
    tensors: { fused: true },
    parameters: 3_821_079_552,
    context: 4096,
  },
];

const configOf = ({ config, sizes }: RealModel) => ({
  ...config,
  hidden_size: sizes.hidden,
  intermediate_size: sizes.inner,
  num_hidden_layers: sizes.layers,
  num_attention_heads: sizes.heads,
  num_key_value_heads: sizes.kvHeads,
  vocab_size: sizes.vocab,
});

const countOf = (tensors: readonly Sized[]): number =>
  tensors.reduce((sum, [, ...shape]) => sum + shape.reduce((product, size) => product * size), 0);

describe.each(MODELS.map((model) => [model.name, model] as const))("%s", (name, model) => {
  const { sizes, parameters, context } = model;
  const tensors = decoderTensors(sizes, model.tensors);
  const directory = writeEmptyCheckpoint(join(folder.path, name), configOf(model), tensors);
  const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const checkpoint = openCheckpoint(directory);
  const planOf = (start: number, end: number, more: Partial<StageOptions> = {}) =>
    planLoad(
      family,
      config,
      {
        span: { start, end, total: sizes.layers },
        maxContext: 4096,
        maxSessions: 1,
        encoding: "bf16",
        ...more,
      },
      checkpoint,
    );
  const ofLayers = (start: number, end: number): Sized[] =>
    tensors.filter(([tensor]) => {
      const layer = /layers\.(\d+)\./.exec(tensor)?.[1];
      return layer !== undefined && Number(layer) >= start && Number(layer) < end;
    });
  const matrices = countOf(ofLayers(0, 1).filter(({ length }) => length === 3));
  const vectors = countOf(ofLayers(0, 1).filter(({ length }) => length === 2));

  test("has the parameters that it is known to have, and a node with all layers reads each once", () => {
    expect(config.maxPositions).toBe(context);
    expect(countOf(tensors)).toBe(parameters);
    const plan = planOf(0, sizes.layers);
    expect(plan.weights.map(({ source }) => source.name).toSorted()).toEqual(
      tensors.map(([tensor]) => tensor).toSorted(),
    );
    expect(plan.readBytes).toBe(2 * parameters);
  });

  test("gives a node in the middle its own layers, to the byte, in each encoding", () => {
    const [start, end] = [3, 7];
    const bytesOf = (more: Partial<StageOptions>) => planOf(start, end, more).weightBytes;
    const plan = planOf(start, end);
    expect(plan.weights.map(({ source }) => source.name).toSorted()).toEqual(
      ofLayers(start, end)
        .map(([tensor]) => tensor)
        .toSorted(),
    );
    expect(plan.weightBytes).toBe(4 * (2 * matrices + 4 * vectors));
    const outputs = ofLayers(0, 1).reduce((sum, [, rows, columns]) => sum + (columns === undefined ? 0 : rows!), 0);
    expect(bytesOf({ encoding: "int8" })).toBe(4 * (matrices + 4 * outputs + 4 * vectors));
    expect(bytesOf({ encoding: "nf4" })).toBe(4 * (matrices / 2 + 4 * (matrices / 64) + 4 * vectors));
  });

  test("takes keys and values of its key heads only", () => {
    const { rows } = memoryPlan(planOf(3, 7, { maxSessions: 2 }));
    const cache = rows.filter(({ category }) => category === "kv cache").reduce((sum, { bytes }) => sum + bytes, 0);
    expect(cache).toBe(4 * 2 * 4096 * 2 * sizes.kvHeads * sizes.headDim * 2); // layers, sequences, tokens, k and v
  });

  test("keeps what a pass needs within a few times what its tokens are", () => {
    // Of 512 tokens: stream, normed, projected of the hidden size, qkv, attended, gate and up, what the MLP makes of them.
    const { hidden, inner, heads, kvHeads, headDim } = sizes;
    const widths = 3 * hidden + (heads + 2 * kvHeads) * headDim + heads * headDim + 3 * inner;
    const rope = 4096 * headDim * 4; // 4096 positions, a cosine and a sine for each pair of dimensions
    const partial = heads * (4096 / 32) * (headDim + 2) * 4; // of one token: 128 chunks of 32 keys
    const singles = Math.min(64, Math.floor((32 * 2 ** 20) / partial));
    const tables = 512 * 4 * (2 + 1 + 4) + 128 * 4 + 8 * 4; // as in memory-plan.test.ts
    const row = memoryPlan(planOf(3, 7)).rows.find(({ detail }) => detail === "passes of up to 512 tokens");
    expect(row!.bytes).toBe(512 * 4 * widths + rope + singles * partial + tables);
  });
});
