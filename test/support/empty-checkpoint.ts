import { closeSync, ftruncateSync, mkdirSync, openSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { fileWithHeader } from "./safetensors.ts";

export type Sized = [name: string, ...shape: number[]];

/** A checkpoint of these tensors in bfloat16, all zero: a file with holes, which takes no room on the disk whatever its size. */
export function writeEmptyCheckpoint(
  folder: string,
  config: Record<string, unknown>,
  tensors: readonly Sized[],
): string {
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, "config.json"), JSON.stringify(config));
  let at = 0;
  const entries = tensors.map(([name, ...sizes]) => {
    const begin = at;
    at += 2 * sizes.reduce((product, size) => product * size);
    return [name, { dtype: "BF16", shape: sizes, data_offsets: [begin, at] }];
  });
  const start = fileWithHeader(JSON.stringify(Object.fromEntries(entries)));
  const file = openSync(join(folder, "model.safetensors"), "w");
  writeSync(file, start);
  ftruncateSync(file, start.length + at);
  closeSync(file);
  return folder;
}

/** Sizes by the names of config.json. */
export interface DecoderSizes {
  readonly hidden: number;
  readonly inner: number;
  readonly layers: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly vocab: number;
}

/** The tensors of a model after Llama's pattern, by the names of its checkpoint (see `reference` in the models' descriptions). */
export function decoderTensors(
  { hidden, inner, layers, heads, kvHeads, headDim, vocab }: DecoderSizes,
  { tied = false, qkvBias = false, fused = false, norms = ["input_layernorm", "post_attention_layernorm"] } = {},
): Sized[] {
  const layer = (l: string): Sized[] => {
    const qkv: Sized[] = fused
      ? [[`${l}.self_attn.qkv_proj.weight`, (heads + 2 * kvHeads) * headDim, hidden]]
      : [
          [`${l}.self_attn.q_proj.weight`, heads * headDim, hidden],
          [`${l}.self_attn.k_proj.weight`, kvHeads * headDim, hidden],
          [`${l}.self_attn.v_proj.weight`, kvHeads * headDim, hidden],
        ];
    const biases: Sized[] = [
      [`${l}.self_attn.q_proj.bias`, heads * headDim],
      [`${l}.self_attn.k_proj.bias`, kvHeads * headDim],
      [`${l}.self_attn.v_proj.bias`, kvHeads * headDim],
    ];
    const expand: Sized[] = fused
      ? [[`${l}.mlp.gate_up_proj.weight`, 2 * inner, hidden]]
      : [
          [`${l}.mlp.gate_proj.weight`, inner, hidden],
          [`${l}.mlp.up_proj.weight`, inner, hidden],
        ];
    return [
      ...qkv,
      ...(qkvBias ? biases : []),
      [`${l}.self_attn.o_proj.weight`, hidden, heads * headDim],
      ...expand,
      [`${l}.mlp.down_proj.weight`, hidden, inner],
      ...norms.map((name): Sized => [`${l}.${name}.weight`, hidden]),
    ];
  };
  return [
    ["model.embed_tokens.weight", vocab, hidden],
    ...Array.from({ length: layers }, (_, index) => layer(`model.layers.${index}`)).flat(),
    ["model.norm.weight", hidden],
    ...(tied ? [] : [["lm_head.weight", vocab, hidden] satisfies Sized]),
  ];
}
