import { afterAll, describe, expect, test } from "bun:test";
import { closeSync, ftruncateSync, mkdirSync, openSync, readFileSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { readModel, type StageOptions } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { memoryPlan } from "../../src/weights/memory-plan.ts";
import { neededNames, planLoad, unexpectedNames, weightBytesPerToken } from "../../src/weights/plan.ts";
import { fileWithHeader, temporaryFolder } from "../support/safetensors.ts";

// Mixtures of experts of 30 to 671 billion parameters, by their config.json alone: the checkpoints are headers over holes. The
// sums are written out as on paper.

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

type Sized = [name: string, shape: number[], dtype?: "BF16" | "F32" | "F8_E4M3"];
const BYTES = { BF16: 2, F32: 4, F8_E4M3: 1 };

/** A checkpoint whose data is a hole, which takes no room on the disk whatever its size. */
function write(name: string, config: Record<string, unknown>, tensors: readonly Sized[]) {
  const directory = join(folder.path, name);
  mkdirSync(directory, { recursive: true });
  writeFileSync(join(directory, "config.json"), JSON.stringify(config));
  let at = 0;
  const entries = tensors.map(([key, shape, dtype = "BF16"]) => {
    const begin = at;
    at += BYTES[dtype] * shape.reduce((product, size) => product * size, 1);
    return [key, { dtype, shape, data_offsets: [begin, at] }];
  });
  const start = fileWithHeader(JSON.stringify(Object.fromEntries(entries)));
  const file = openSync(join(directory, "model.safetensors"), "w");
  writeSync(file, start);
  ftruncateSync(file, start.length + at);
  closeSync(file);

  const { family, config: model } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const checkpoint = openCheckpoint(directory);
  const optionsOf = (start: number, end: number, more: Partial<StageOptions>): StageOptions => ({
    span: { start, end, total: model.layers },
    maxContext: 4096,
    maxSessions: 1,
    encoding: "bf16",
    ...more,
  });
  return {
    family,
    model,
    checkpoint,
    options: optionsOf(0, model.layers, {}),
    plan: (start: number, end: number, more: Partial<StageOptions> = {}) =>
      planLoad(family, model, optionsOf(start, end, more), checkpoint),
  };
}

const range = (end: number): number[] => Array.from({ length: end }, (_, i) => i);
const countOf = (tensors: readonly Sized[]): number =>
  tensors
    .filter(([name]) => !name.endsWith("_scale_inv"))
    .reduce((sum, [, shape]) => sum + shape.reduce((product, size) => product * size, 1), 0);

/** Queries, keys and values side by side, and norms. */
const attention = (l: string, hidden: number, heads: number, kvHeads: number, headDim: number): Sized[] => [
  [`${l}.input_layernorm.weight`, [hidden]],
  [`${l}.post_attention_layernorm.weight`, [hidden]],
  [`${l}.self_attn.q_proj.weight`, [heads * headDim, hidden]],
  [`${l}.self_attn.k_proj.weight`, [kvHeads * headDim, hidden]],
  [`${l}.self_attn.v_proj.weight`, [kvHeads * headDim, hidden]],
  [`${l}.self_attn.o_proj.weight`, [hidden, heads * headDim]],
];

const mlp = (
  name: string,
  hidden: number,
  inner: number,
  [gate, up, down] = ["gate_proj", "up_proj", "down_proj"],
): Sized[] => [
  [`${name}.${gate}.weight`, [inner, hidden]],
  [`${name}.${up}.weight`, [inner, hidden]],
  [`${name}.${down}.weight`, [hidden, inner]],
];

const ends = (hidden: number, vocab: number): Sized[] => [
  ["model.embed_tokens.weight", [vocab, hidden]],
  ["model.norm.weight", [hidden]],
  ["lm_head.weight", [vocab, hidden]],
];

describe("DeepSeek-V3, 671 billion parameters in FP8", () => {
  /** Of a layer: compressed queries, then all heads'; the latent with the turned key, then keys and values; the way back. */
  const ATTENTION = 1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 128 * 256 * 512 + 7168 * 128 * 128; // 187,105,280
  const EXPERT = 3 * 2048 * 7168; // 44,040,192
  const VECTORS = 1536 + 512 + 2 * 7168; // norms

  const inFp8 = (tensors: Sized[]): Sized[] =>
    tensors.flatMap(([name, shape]): Sized[] => [
      [name, shape, "F8_E4M3"],
      [`${name}_scale_inv`, shape.map((size) => Math.ceil(size / 128)), "F32"],
    ]);
  const layer = (i: number): Sized[] => {
    const l = `model.layers.${i}`;
    const linear: Sized[] = [
      [`${l}.self_attn.q_a_proj.weight`, [1536, 7168]],
      [`${l}.self_attn.q_b_proj.weight`, [24576, 1536]],
      [`${l}.self_attn.kv_a_proj_with_mqa.weight`, [576, 7168]],
      [`${l}.self_attn.kv_b_proj.weight`, [32768, 512]],
      [`${l}.self_attn.o_proj.weight`, [7168, 16384]],
      ...(i < 3
        ? mlp(`${l}.mlp`, 7168, 18432)
        : [
            ...range(256).flatMap((e) => mlp(`${l}.mlp.experts.${e}`, 7168, 2048)),
            ...mlp(`${l}.mlp.shared_experts`, 7168, 2048),
          ]),
    ];
    const rest: Sized[] = [
      [`${l}.input_layernorm.weight`, [7168]],
      [`${l}.post_attention_layernorm.weight`, [7168]],
      [`${l}.self_attn.q_a_layernorm.weight`, [1536]],
      [`${l}.self_attn.kv_a_layernorm.weight`, [512]],
      ...(i < 3
        ? []
        : ([
            [`${l}.mlp.gate.weight`, [256, 7168]],
            [`${l}.mlp.gate.e_score_correction_bias`, [256], "F32"],
          ] satisfies Sized[])),
    ];
    return [...inFp8(linear), ...rest];
  };
  const layers = range(61).flatMap(layer);
  const guess: Sized[] = [...layer(61), ["model.layers.61.eh_proj.weight", [7168, 2 * 7168]]];
  const { family, model, options, checkpoint, plan } = write(
    "v3",
    {
      model_type: "deepseek_v3",
      max_position_embeddings: 163840,
      topk_method: "noaux_tc",
      scoring_func: "sigmoid",
      num_nextn_predict_layers: 1,
      rope_theta: 10000,
      rope_scaling: {
        type: "yarn",
        factor: 40,
        original_max_position_embeddings: 4096,
        beta_fast: 32,
        beta_slow: 1,
        mscale: 1,
        mscale_all_dim: 1,
      },
      quantization_config: {
        quant_method: "fp8",
        fmt: "e4m3",
        activation_scheme: "dynamic",
        weight_block_size: [128, 128],
      },
    },
    [...ends(7168, 129280), ...layers, ...guess],
  );

  test("has as many parameters as its publisher says, and its scores a factor of their own", () => {
    expect(countOf([...ends(7168, 129280), ...layers])).toBe(671_026_419_200); // a correction for each expert included
    expect(model).toMatchObject({ layers: 61, mixture: { experts: 256, chosen: 8 } });
    expect((model as unknown as { attentionScale: number }).attentionScale).toBeCloseTo(0.1352338, 6);
  });

  test("in bfloat16 takes two bytes of each parameter of the span, whatever the file has", () => {
    const dense = plan(1, 3);
    expect(dense.weightBytes).toBe(2 * (2 * (ATTENTION + 3 * 18432 * 7168) + 4 * VECTORS));
    const sparse = plan(3, 5);
    const layer = 2 * (ATTENTION + 257 * EXPERT + 256 * 7168) + 4 * (VECTORS + 256);
    expect(sparse.weightBytes).toBe(2 * layer); // 46.0 GB
    // Read: a byte of each, 4 for each block; the router in two bytes, norms too, the correction in four.
    const grids =
      12 * 56 +
      192 * 12 +
      5 * 56 +
      256 * 4 +
      56 * 128 + // attention: 576 rows are five blocks, the last of 64
      257 * 3 * 16 * 56;
    expect(sparse.readBytes).toBe(2 * (ATTENTION + 257 * EXPERT + 4 * grids + 2 * (256 * 7168 + VECTORS) + 4 * 256));
  });

  test("in NF4 takes half a byte and a sixteenth of each but the routers", () => {
    const { weightBytes } = plan(3, 5, { encoding: "nf4" });
    const layer = (ATTENTION + 257 * EXPERT) * 0.5625 + 2 * 256 * 7168 + 4 * (VECTORS + 256);
    expect(weightBytes).toBe(2 * layer); // 12.95 GB
    const int8 = plan(3, 4, { encoding: "int8" });
    const rows = 1536 + 24576 + 576 + 32768 + 7168 + 257 * (2048 + 2048 + 7168); // a factor for each
    expect(int8.weightBytes).toBe(ATTENTION + 257 * EXPERT + 4 * rows + 2 * 256 * 7168 + 4 * (VECTORS + 256));
  });

  test("reads of each layer's experts eight for a token", () => {
    const layer = 2 * (ATTENTION + (1 + 8) * EXPERT + 256 * 7168) + 4 * (VECTORS + 256);
    expect(weightBytesPerToken(plan(3, 5))).toBe(2 * layer);
  });

  test("keeps 576 numbers of each token and layer", () => {
    const { rows } = memoryPlan(plan(3, 5, { maxSessions: 3 }));
    const cache = rows.find(({ category }) => category === "kv cache")!;
    expect(cache.bytes).toBe(2 * 3 * 4096 * 576 * 2); // layers, sequences, tokens, a latent of 512 and a key of 64
  });

  test("while it is quantized has one expert in bfloat16 beside the rest, or its largest matrix", () => {
    const { rows } = memoryPlan(plan(3, 5, { encoding: "nf4" }));
    const loading = rows.find(({ detail }) => detail.startsWith("the largest matrix"))!;
    expect(loading.bytes).toBe(2 * 7168 * 16384); // o_proj: 235 MB
  });

  test("needs nothing of the layer that guesses, and does not wonder about it", () => {
    expect(unexpectedNames(family, model, options, checkpoint)).toEqual([]);
    const names = neededNames(family, model, options);
    expect([...names].filter((name) => name.includes("layers.61."))).toEqual([]);
    expect(names.has("model.layers.60.mlp.experts.255.down_proj.weight_scale_inv")).toBe(true);
  }, 30_000);
});

describe("Mixtral 8x7B", () => {
  const LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096; // q and o, k and v of 8 heads of 128
  const EXPERT = 3 * 4096 * 14336;
  const layers = range(32).flatMap((i): Sized[] => [
    ...attention(`model.layers.${i}`, 4096, 32, 8, 128),
    [`model.layers.${i}.block_sparse_moe.gate.weight`, [8, 4096]],
    ...range(8).flatMap((e) => mlp(`model.layers.${i}.block_sparse_moe.experts.${e}`, 4096, 14336, ["w1", "w3", "w2"])),
  ]);
  const { plan } = write("mixtral", { model_type: "mixtral", max_position_embeddings: 32768 }, [
    ...ends(4096, 32000),
    ...layers,
  ]);

  test("has 46.7 billion parameters, of which a token reads 12.9", () => {
    expect(countOf([...ends(4096, 32000), ...layers])).toBe(46_702_792_704);
    const whole = plan(0, 32);
    expect(whole.weightBytes).toBe(2 * 46_702_792_704 + 2 * 65 * 4096); // norms in float32
    const perToken = 32 * (LAYER + 2 * EXPERT + 8 * 4096) + 32000 * 4096; // without the embedding's other rows
    expect(weightBytesPerToken(whole)).toBe(2 * perToken + 4 * 65 * 4096);
  });

  test("takes of a span its experts alone", () => {
    expect(plan(7, 9, { encoding: "nf4" }).weightBytes).toBe(
      2 * ((LAYER + 8 * EXPERT) * 0.5625 + 2 * 8 * 4096 + 4 * 2 * 4096),
    );
  });
});

describe("Qwen3-30B-A3B", () => {
  const layers = range(48).flatMap((i): Sized[] => [
    ...attention(`model.layers.${i}`, 2048, 32, 4, 128),
    [`model.layers.${i}.self_attn.q_norm.weight`, [128]],
    [`model.layers.${i}.self_attn.k_norm.weight`, [128]],
    [`model.layers.${i}.mlp.gate.weight`, [128, 2048]],
    ...range(128).flatMap((e) => mlp(`model.layers.${i}.mlp.experts.${e}`, 2048, 768)),
  ]);
  const { plan } = write(
    "qwen3",
    { model_type: "qwen3_moe", num_hidden_layers: 48, head_dim: 128, norm_topk_prob: true, max_window_layers: 48 },
    [...ends(2048, 151936), ...layers],
  );

  test("has 30.5 billion parameters, and a span takes its experts alone", () => {
    expect(countOf([...ends(2048, 151936), ...layers])).toBe(30_532_122_624);
    const layer = 2 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048 + 128 * 3 * 768 * 2048) + 4 * (2 * 2048 + 2 * 128);
    expect(plan(10, 13).weightBytes).toBe(3 * layer);
  });
});
