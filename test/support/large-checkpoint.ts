import { closeSync, ftruncateSync, mkdirSync, openSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { INDEX_FILE } from "../../src/safetensors/checkpoint.ts";
import { fileWithHeader } from "./safetensors.ts";

const VOCAB = 50257;
const POSITIONS = 1024;

/** GPT-2's twelve tensors of a layer. */
const layerOf = (hidden: number): readonly [name: string, ...shape: number[]][] => [
  ["ln_1.weight", hidden],
  ["ln_1.bias", hidden],
  ["attn.c_attn.weight", hidden, 3 * hidden],
  ["attn.c_attn.bias", 3 * hidden],
  ["attn.c_proj.weight", hidden, hidden],
  ["attn.c_proj.bias", hidden],
  ["ln_2.weight", hidden],
  ["ln_2.bias", hidden],
  ["mlp.c_fc.weight", hidden, 4 * hidden],
  ["mlp.c_fc.bias", 4 * hidden],
  ["mlp.c_proj.weight", 4 * hidden, hidden],
  ["mlp.c_proj.bias", hidden],
];

/**
 * A GPT-2 of any number of layers over any number of shards, with its index: headers as they should be, data that is a
 * hole in the file. Gives the number of tensors.
 */
export function writeLargeCheckpoint(folder: string, layers: number, shards: number, hidden = 768): number {
  mkdirSync(folder, { recursive: true });
  const config = {
    model_type: "gpt2",
    n_layer: layers,
    n_embd: hidden,
    n_head: hidden / 64,
    n_positions: POSITIONS,
    vocab_size: VOCAB,
  };
  writeFileSync(join(folder, "config.json"), JSON.stringify(config));
  const tensors: [name: string, ...shape: number[]][] = [
    ["wte.weight", VOCAB, hidden],
    ["wpe.weight", POSITIONS, hidden],
    ...Array.from({ length: layers }, (_, i) =>
      layerOf(hidden).map(([name, ...shape]): [string, ...number[]] => [`h.${i}.${name}`, ...shape]),
    ).flat(),
    ["ln_f.weight", hidden],
    ["ln_f.bias", hidden],
  ];
  const weightMap: Record<string, string> = {};
  const perShard = Math.ceil(tensors.length / shards);
  const number = (shard: number) => `${shard}`.padStart(5, "0");
  for (let shard = 0; shard < shards; shard++) {
    const name = `model-${number(shard + 1)}-of-${number(shards)}.safetensors`;
    const some = tensors.slice(shard * perShard, (shard + 1) * perShard);
    for (const [tensor] of some) weightMap[tensor] = name;
    writeShard(join(folder, name), some);
  }
  writeFileSync(join(folder, INDEX_FILE), JSON.stringify({ metadata: {}, weight_map: weightMap }, null, 2));
  return tensors.length;
}

function writeShard(path: string, tensors: readonly [name: string, ...shape: number[]][]): void {
  let at = 0;
  const entries = tensors.map(([name, ...shape]) => {
    const begin = at;
    at += 4 * shape.reduce((product, size) => product * size);
    return [name, { dtype: "F32", shape, data_offsets: [begin, at] }];
  });
  const start = fileWithHeader(JSON.stringify(Object.fromEntries(entries)));
  const file = openSync(path, "w");
  writeSync(file, start);
  ftruncateSync(file, start.length + at);
  closeSync(file);
}
