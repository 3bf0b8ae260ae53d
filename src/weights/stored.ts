import { ceilDiv } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { WeightSpec } from "../nn/index.ts";
import type { Checkpoint, CheckpointTensor } from "../safetensors/checkpoint.ts";
import { NF4_BLOCK, type Quantized } from "./quantize.ts";

/** A weight that its checkpoint keeps quantized by bitsandbytes, and the tensors that lie beside it. */
export interface StoredWeight {
  readonly encoding: Quantized;
  /** INT8: SCB of each row. Four bits: absmax of each block, F32, or U8 where absmax is quantized itself. */
  readonly scales: CheckpointTensor;
  readonly nested?: { readonly absmax: CheckpointTensor; readonly map: CheckpointTensor };
  /** What bitsandbytes knows besides, as JSON (four bits), and the layout, which must be 0 (INT8). */
  readonly state?: CheckpointTensor;
  readonly layout?: CheckpointTensor;
}

/** `quant_type` in bitsandbytes, and what it is here. */
const FOUR_BITS = ["nf4", "fp4"] as const;

/** The names under which a checkpoint may keep what belongs to a quantized weight. */
export const storedNames = (weight: string): string[] => [
  ...["absmax", "nested_absmax", "nested_quant_map"].map((name) => `${weight}.${name}`),
  ...FOUR_BITS.map((type) => stateName(weight, type)),
  `${moduleOf(weight)}.SCB`,
  `${moduleOf(weight)}.weight_format`,
];

/** Named with them, and of no use: the code book is that of the encoding. */
export const isStoredCodeBook = (name: string): boolean => name.endsWith(".weight.quant_map");

const stateName = (weight: string, type: string): string => `${weight}.quant_state.bitsandbytes__${type}`;
const moduleOf = (weight: string): string => weight.replace(/\.weight$/, "");

/** Tensors that are read along with the weight. */
export const companionsOf = ({ scales, nested, state, layout }: StoredWeight): CheckpointTensor[] =>
  [scales, nested?.absmax, nested?.map, state, layout].filter((tensor) => tensor !== undefined);

/**
 * How the checkpoint keeps this weight quantized, or undefined where it is an ordinary tensor.
 * @throws UserError `bad_model` where what belongs to it is missing or of another size.
 */
export function findStored(
  spec: WeightSpec,
  codes: CheckpointTensor,
  { tensors }: Checkpoint,
): StoredWeight | undefined {
  const { rows, columns } = spec;
  if (!spec.quantizable || ["F32", "F16", "BF16"].includes(codes.dtype)) return undefined;
  const find = (name: string) => tensors.get(name);
  const scb = find(`${moduleOf(codes.name)}.SCB`);
  if (codes.dtype === "I8" && scb) {
    checkSize(codes, "I8", rows * columns);
    checkSize(scb, "F32", rows);
    return { encoding: "int8", scales: scb, layout: find(`${moduleOf(codes.name)}.weight_format`) };
  }

  const type = FOUR_BITS.find((candidate) => find(stateName(codes.name, candidate)));
  if (!type) return undefined; // of a type that nothing here reads: said by the plan
  const absmax = find(`${codes.name}.absmax`);
  if (!absmax) throw lacks(codes, `${codes.name}.absmax`);
  const blocks = ceilDiv(rows * columns, NF4_BLOCK);
  // The codes may be stored under any type: their bytes count.
  const bytes = codes.end - codes.begin;
  if (bytes !== ceilDiv(rows * columns, 2)) throw wrongSize(codes, bytes, ceilDiv(rows * columns, 2));
  const state = find(stateName(codes.name, type))!;
  if (absmax.dtype === "F32") {
    checkSize(absmax, "F32", blocks);
    return { encoding: type, scales: absmax, state };
  }
  checkSize(absmax, "U8", blocks);
  const nested = { absmax: find(`${codes.name}.nested_absmax`), map: find(`${codes.name}.nested_quant_map`) };
  if (!nested.absmax || !nested.map) throw lacks(codes, `${codes.name}.nested_absmax and nested_quant_map`);
  checkSize(nested.map, "F32", 256);
  if (nested.absmax.dtype !== "F32") throw wrongSize(nested.absmax, 0, 4);
  return { encoding: type, scales: absmax, nested: { absmax: nested.absmax, map: nested.map }, state };
}

const BYTES: Record<string, number> = { F32: 4, U8: 1, I8: 1 };

function checkSize(tensor: CheckpointTensor, dtype: string, count: number): void {
  const bytes = tensor.end - tensor.begin;
  if (tensor.dtype !== dtype || bytes !== count * BYTES[dtype]!) throw wrongSize(tensor, bytes, count * BYTES[dtype]!);
}

const HINT =
  "save the quantized model again with transformers and bitsandbytes, or use the checkpoint that it was made of";

const wrongSize = ({ name, dtype, file }: CheckpointTensor, bytes: number, expected: number): UserError =>
  new UserError(
    "bad_model",
    `${file.name}: tensor ${name} is ${bytes} bytes of ${dtype}, and bitsandbytes makes ${expected}`,
    HINT,
  );

const lacks = ({ name, file }: CheckpointTensor, missing: string): UserError =>
  new UserError("bad_model", `${file.name}: tensor ${name} is quantized, and ${missing} is missing`, HINT);

/** What the loader needs of the state: the checks are against the model, the offset is added to each nested absmax. */
export interface QuantState {
  readonly nestedBlock: number;
  readonly nestedOffset: number;
}

/** @throws UserError `bad_model` for JSON that is cut or says anything that this weight is not. */
export function parseState(bytes: Uint8Array, { rows, columns }: WeightSpec, stored: StoredWeight): QuantState {
  const name = stored.state!.name;
  const refuse = (problem: string, cause?: unknown) =>
    new UserError("bad_model", `tensor ${name} ${problem}`, HINT, { cause });
  let state: Record<string, unknown>;
  try {
    state = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (cause) {
    throw refuse("is not JSON", cause);
  }
  const expected = { quant_type: stored.encoding, blocksize: NF4_BLOCK, shape: [rows, columns] };
  for (const [key, value] of Object.entries(expected)) {
    if (JSON.stringify(state?.[key]) === JSON.stringify(value)) continue;
    throw refuse(`says ${key} ${JSON.stringify(state?.[key])}, and this weight wants ${JSON.stringify(value)}`);
  }
  const { nested_blocksize: nestedBlock = 256, nested_offset: nestedOffset = 0 } = state;
  if (!Number.isSafeInteger(nestedBlock) || (nestedBlock as number) < 1)
    throw refuse(`says nested_blocksize ${nestedBlock}`);
  if (typeof nestedOffset !== "number") throw refuse(`says nested_offset ${nestedOffset}`);
  return { nestedBlock: nestedBlock as number, nestedOffset };
}

/** absmax of each block, float32: code by code, in the order of bitsandbytes' `dequantize_blockwise`. */
export function unnest(codes: Uint8Array, absmax: Float32Array, map: Float32Array, state: QuantState): Float32Array {
  const { fround } = Math;
  const offset = fround(state.nestedOffset);
  return Float32Array.from(codes, (code, block) => {
    const scale = absmax[Math.floor(block / state.nestedBlock)] ?? Number.NaN;
    return fround(fround(map[code]! * scale) + offset);
  });
}

/** The code of zero, with which rows are filled up. */
const ZERO: Record<Quantized, number> = { nf4: 7, fp4: 0, int8: 0 };

/**
 * Codes of four bits, flat and the first in the high half of a byte as bitsandbytes packs them, into rows of `words` words
 * with the first code in the lowest bits. `first`: index of the first code in `bytes`.
 */
export function repack4(
  bytes: Uint8Array,
  first: number,
  rows: number,
  columns: number,
  words: number,
  encoding: Quantized,
): Uint32Array {
  const filler = ZERO[encoding];
  const packed = new Uint32Array(rows * words);
  let at = first;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < words * 8; column++) {
      let code = filler;
      if (column < columns) {
        code = at % 2 === 0 ? bytes[at >> 1]! >> 4 : bytes[at >> 1]! & 15;
        at++;
      }
      packed[row * words + (column >> 3)]! |= code << ((column & 7) * 4);
    }
  }
  return packed;
}
