import { copyFileSync, mkdirSync } from "node:fs";
import { join } from "node:path";
import { type Sized, writeEmptyCheckpoint } from "./empty-checkpoint.ts";
import { TINY } from "./oracle.ts";

export interface Gpt2Shape {
  readonly layers: number;
  readonly hidden: number;
  readonly heads: number;
  readonly vocab: number;
  readonly positions: number;
}

/** openai-community/gpt2 and gpt2-xl. */
export const GPT2_124M: Gpt2Shape = { layers: 12, hidden: 768, heads: 12, vocab: 50257, positions: 1024 };
export const GPT2_XL: Gpt2Shape = { layers: 48, hidden: 1600, heads: 25, vocab: 50257, positions: 1024 };

/**
 * A GPT-2 of this shape with every weight zero, in bfloat16: a file with holes, which takes no room on the disk whatever
 * the shape. It loads and serves; all its logits are equal. The tokenizer is the tiny model's.
 */
export function writeEmptyGpt2(folder: string, shape: Gpt2Shape): string {
  const { layers, hidden, heads, vocab, positions } = shape;
  mkdirSync(folder, { recursive: true });
  for (const name of ["tokenizer.json", "tokenizer_config.json"]) copyFileSync(join(TINY, name), join(folder, name));
  const config = {
    model_type: "gpt2",
    vocab_size: vocab,
    n_positions: positions,
    n_embd: hidden,
    n_layer: layers,
    n_head: heads,
  };
  return writeEmptyCheckpoint(folder, config, tensorsOf(shape));
}

function tensorsOf({ layers, hidden, vocab, positions }: Gpt2Shape): Sized[] {
  const conv1d = (name: string, rows: number, columns: number): Sized[] => [
    [`${name}.weight`, rows, columns],
    [`${name}.bias`, columns],
  ];
  const norm = (name: string): Sized[] => [
    [`${name}.weight`, hidden],
    [`${name}.bias`, hidden],
  ];
  const layer = (h: string): Sized[] => [
    ...norm(`${h}.ln_1`),
    ...conv1d(`${h}.attn.c_attn`, hidden, 3 * hidden),
    ...conv1d(`${h}.attn.c_proj`, hidden, hidden),
    ...norm(`${h}.ln_2`),
    ...conv1d(`${h}.mlp.c_fc`, hidden, 4 * hidden),
    ...conv1d(`${h}.mlp.c_proj`, 4 * hidden, hidden),
  ];
  return [
    ["wte.weight", vocab, hidden],
    ["wpe.weight", positions, hidden],
    ...Array.from({ length: layers }, (_, index) => layer(`h.${index}`)).flat(),
    ...norm("ln_f"),
  ];
}
