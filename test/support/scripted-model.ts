import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { seededRandom } from "../../src/engine/self-test/sampler.ts";
import { TINY } from "./oracle.ts";
import { safetensorsFile, type SourceTensor } from "./safetensors.ts";

const HIDDEN = 96;
const VOCAB = 1024;
const POSITIONS = 256;
/** What a fast machine needs many seconds for: whoever looks for a text that is still being written finds it so. */
const ENDLESS_POSITIONS = 4096;
const END_OF_TEXT = 1023;

/**
 * Writes a model into a directory: gpt2-tiny, but so that each position alone decides which token follows. Behind a prompt of one token
 * it writes `text`, byte by byte, and ends.
 */
export function writeScriptedModel(directory: string, text: string): void {
  write(directory, (ids, position) => ids[position] ?? END_OF_TEXT, text, POSITIONS);
}

/** Likewise, but that `text` begins anew until the context of 4096 tokens is full. A chat of any length is a prompt of one token. */
export function writeEndlessModel(directory: string, text: string): void {
  write(directory, (ids, position) => ids[position % ids.length]!, text, ENDLESS_POSITIONS);
  writeFileSync(join(directory, "chat_template.jinja"), "{{ messages[-1].content[:1] }}");
}

function write(
  directory: string,
  follow: (ids: readonly number[], position: number) => number,
  text: string,
  positions: number,
): void {
  cpSync(TINY, directory, { recursive: true });
  const config = JSON.parse(readFileSync(join(TINY, "config.json"), "utf8"));
  writeFileSync(join(directory, "config.json"), JSON.stringify({ ...config, n_positions: positions }));
  const ids = Array.from(new TextEncoder().encode(text), (byte) => idOfByte(byte));
  const random = seededRandom(7);
  const rows = Array.from({ length: VOCAB }, () => Array.from({ length: HIDDEN }, () => (random() < 0.5 ? -1 : 1)));
  const tensors = readTensors(join(TINY, "model.safetensors"));
  for (const [name, { dtype, data }] of Object.entries(tensors)) {
    const values = new Float32Array(data.buffer, data.byteOffset, data.byteLength / 4);
    if (name.endsWith("wte.weight")) values.set(rows.flat());
    else if (name.endsWith("wpe.weight")) {
      // Four times as loud as the token that is read: the head finds it again.
      const all = Array.from({ length: positions }, (_, at) => rows[follow(ids, at)]!.map((value) => 4 * value));
      const bytes = new Uint8Array(Float32Array.from(all.flat()).buffer);
      tensors[name] = { dtype, shape: [positions, HIDDEN], data: bytes };
    } else if (name.includes("c_proj") || name.endsWith("ln_f.bias")) values.fill(0);
    else if (name.endsWith("ln_f.weight")) values.fill(1);
  }
  writeFileSync(join(directory, "model.safetensors"), safetensorsFile(tensors));
}

/** GPT-2's first 256 tokens: the printable bytes, then the others. */
function idOfByte(byte: number): number {
  const bytes = Array.from({ length: 256 }, (_, i) => i);
  const isPrintable = (i: number) => (i > 0x20 && i < 0x7f) || (i > 0xa0 && i !== 0xad);
  return [...bytes.filter(isPrintable), ...bytes.filter((i) => !isPrintable(i))].indexOf(byte);
}

function readTensors(path: string): Record<string, SourceTensor> {
  const file = readFileSync(path);
  const begin = 8 + Number(file.readBigUInt64LE(0));
  const header: Record<string, { dtype: string; shape: number[]; data_offsets: [number, number] }> = JSON.parse(
    file.subarray(8, begin).toString(),
  );
  const entries = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return Object.fromEntries(
    entries.map(([name, { dtype, shape, data_offsets }]) => {
      if (dtype !== "F32") throw new Error(`${name} is ${dtype}`);
      const [from, to] = data_offsets;
      return [name, { dtype, shape, data: new Uint8Array(file.subarray(begin + from, begin + to)) }];
    }),
  );
}
