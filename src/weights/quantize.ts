import { ceilDiv } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Commands } from "../gpu/commands.ts";
import type { PipelineCache } from "../gpu/kernel.ts";
import { strideOf, type Tensor, type TensorStore } from "../gpu/tensor.ts";
import { absmax, quantizeInt8, quantizeNf4, WORKGROUP } from "../kernels/index.ts";
import type { Encoding, Matrix, MatrixPart } from "../nn/index.ts";

/** What bitsandbytes does to a weight, done on the device to a bfloat16 matrix that lies there already. */
export interface QuantizeContext {
  readonly store: TensorStore;
  readonly commands: Commands;
  readonly pipelines: PipelineCache;
}

export type Quantized = Exclude<Encoding, "bf16">;

/** Neighbours of the matrix laid out row after row that share an absmax. */
export const NF4_BLOCK = 64;
/** What bitsandbytes divides by at least, float32. */
const SMALLEST_ABSMAX = Math.fround(1e-38);
/** The largest float16, through which bitsandbytes takes a weight on its way to INT8. */
const LARGEST_F16 = 65504;

/** 32-bit words of a row's codes. */
export const codeWords = (columns: number, encoding: Quantized): number =>
  strideOf(columns, "bf16") / { nf4: 8, fp4: 8, int8: 4 }[encoding];

/** absmax of each block, or SCB of each row. */
export const scaleCount = (rows: number, columns: number, encoding: Quantized): number =>
  encoding === "int8" ? rows : ceilDiv(rows * columns, NF4_BLOCK);

/** A matrix may only be split where a block begins: at a multiple of this many rows. */
export function splitRows(columns: number, encoding: Encoding): number {
  if (encoding === "bf16" || encoding === "int8") return 1;
  let rows = 1;
  while ((rows * columns) % NF4_BLOCK !== 0) rows *= 2;
  return rows;
}

/**
 * The matrix in another encoding; its bfloat16 tensors are destroyed. `name`: the tensor's, for errors.
 * @throws UserError `bad_model` where it holds NaN, infinity, or what float16 cannot hold (INT8).
 */
export async function quantizeMatrix(
  matrix: Matrix,
  encoding: Quantized,
  name: string,
  context: QuantizeContext,
): Promise<Matrix> {
  const parts: MatrixPart[] = [];
  for (const part of matrix.parts) {
    parts.push(await quantizePart(part, matrix.columns, encoding, name, context));
    context.store.destroy(part.tensor);
  }
  return { ...matrix, encoding, parts };
}

async function quantizePart(
  { firstRow, rows, tensor: x }: MatrixPart,
  columns: number,
  encoding: Quantized,
  name: string,
  { store, commands, pipelines }: QuantizeContext,
): Promise<MatrixPart> {
  const label = `${name}[${firstRow}]`;
  const stride = strideOf(columns, "bf16");
  const codes = store.create(`${label} ${encoding}`, rows, codeWords(columns, encoding), "u32");
  const scales = store.create(`${label} scales`, 1, scaleCount(rows, columns, encoding), "f32");

  const block = encoding === "nf4" ? NF4_BLOCK : columns;
  const constants = { COLUMNS: columns, X_STRIDE: stride, BLOCK: block, WORKGROUP };
  const largest = await pipelines.compile(absmax, constants);
  const values = rows * columns;
  commands.dispatch(largest, { x, absmax: scales }, { values }, { blocks: scales.columns });
  const { buffer } = await commands.read(scales, scales.columns * 4);
  const magnitudes = new Float32Array(buffer);
  checkMagnitudes(magnitudes, encoding, name);

  const dims = { rows, columns: stride };
  switch (encoding) {
    case "nf4": {
      if (values % NF4_BLOCK !== 0 && magnitudes.at(-1)! < SMALLEST_ABSMAX) {
        magnitudes[magnitudes.length - 1] = SMALLEST_ABSMAX; // bitsandbytes keeps that of a last, short block so
        store.write(scales, magnitudes);
      }
      const pipeline = await pipelines.compile(quantizeNf4, constants);
      commands.dispatch(pipeline, { x, absmax: scales, codes }, { rows }, dims);
      break;
    }
    case "int8": {
      const scb = Float32Array.from(new Float16Array(magnitudes));
      store.write(scales, scb);
      const scale: Tensor = store.create(`${label} scale`, 1, rows, "f32");
      store.write(
        scale,
        // By the reciprocal, as torch divides a number by a tensor: it decides which way half a code rounds.
        scb.map((value) => (value === 0 ? 0 : Math.fround(1 / value) * 127)),
      );
      const pipeline = await pipelines.compile(quantizeInt8, constants);
      commands.dispatch(pipeline, { x, scale, codes }, { rows }, dims);
      commands.flush();
      store.destroy(scale);
      break;
    }
    case "fp4":
      throw new Error("FP4 is read where a checkpoint has it, and never made");
  }
  commands.flush();
  return { firstRow, rows, tensor: codes, scales };
}

function checkMagnitudes(magnitudes: Float32Array, encoding: Quantized, name: string): void {
  const most = encoding === "int8" ? LARGEST_F16 : Number.MAX_VALUE;
  const wrong = magnitudes.find((value) => !(value <= most));
  if (wrong === undefined) return;
  throw new UserError(
    "bad_model",
    Number.isFinite(wrong)
      ? `tensor ${name} holds ${wrong}, and int8 goes through float16, which ends at ${LARGEST_F16}`
      : `tensor ${name} holds ${wrong}, which has no ${encoding} code`,
    "use a checkpoint whose weights are numbers, or load it with --quantization bfloat16",
  );
}
