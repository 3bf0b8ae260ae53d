import { closeSync, ftruncateSync, mkdirSync, openSync, writeFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import { fileWithHeader } from "./safetensors.ts";

export type SizedTensor = [name: string, ...shape: number[]];

/**
 * A checkpoint with these tensors, in bfloat16 and all zeros: a file with holes, which takes no room on the disk whatever it
 * says that it holds.
 */
export function writeEmptyCheckpoint(folder: string, config: object, tensors: readonly SizedTensor[]): string {
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, "config.json"), JSON.stringify(config));
  let at = 0;
  const entries = tensors.map(([name, ...shape]) => {
    const begin = at;
    at += 2 * shape.reduce((product, size) => product * size);
    return [name, { dtype: "BF16", shape, data_offsets: [begin, at] }];
  });
  const start = fileWithHeader(JSON.stringify(Object.fromEntries(entries)));
  const file = openSync(join(folder, "model.safetensors"), "w");
  writeSync(file, start);
  ftruncateSync(file, start.length + at);
  closeSync(file);
  return folder;
}
