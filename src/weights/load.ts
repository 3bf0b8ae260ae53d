import type { Commands } from "../gpu/commands.ts";
import type { Device } from "../gpu/device.ts";
import type { PipelineCache } from "../gpu/kernel.ts";
import { strideOf, type Tensor, type TensorStore } from "../gpu/tensor.ts";
import { transposeBf16, WORKGROUP } from "../kernels/index.ts";
import type { Matrix, MatrixPart, WeightSource, WeightSpec } from "../nn/index.ts";
import { bf16ArrayToF32, convertToBf16, type FloatDtype } from "../quant/bf16.ts";
import type { CheckpointTensor } from "../safetensors/checkpoint.ts";
import { mapRange } from "../safetensors/mapped-file.ts";
import type { LoadPlan } from "./plan.ts";

export interface LoadContext {
  readonly device: Device;
  readonly store: TensorStore;
  readonly commands: Commands;
  readonly pipelines: PipelineCache;
  /** Through which transposed weights pass: the plan's buffer of that name. */
  readonly upload: Tensor;
  /** The largest tensor that a kernel may bind: the device's own limit, or less to try how weights are split. */
  readonly maxBindingBytes: number;
  readonly onProgress?: (readBytes: number, totalBytes: number) => void;
}

/** A file is mapped for about this many bytes at a time, so that memory stays small whatever a tensor's size. */
const PIECE_BYTES = 4 * 2 ** 20;
/** A device may hold on to written bytes until the next submit: so many are let gather. */
const RECLAIM_BYTES = 16 * 2 ** 20;

/**
 * Walks the plan: maps each tensor piece by piece, converts it to bfloat16, puts it on the device and forgets it.
 * @throws UserError `bad_model` when a file is no longer what its header said.
 */
export async function loadWeights(plan: LoadPlan, context: LoadContext): Promise<WeightSource> {
  const matrices = new Map<string, Matrix>();
  const vectors = new Map<string, Tensor>();
  let readBytes = 0;
  for (const { source, specs } of plan.weights) {
    const [first] = specs;
    const load = first!.kind === "matrix" ? loadMatrix : loadVector;
    const loaded = await load(first!, source, context);
    for (const spec of specs) {
      if ("parts" in loaded) matrices.set(keyOf(spec), loaded);
      else vectors.set(keyOf(spec), loaded);
    }
    readBytes += source.end - source.begin;
    context.onProgress?.(readBytes, plan.readBytes);
  }
  context.commands.flush();
  await context.device.reclaim();
  return { matrix: (spec) => found(matrices, spec), vector: (spec) => found(vectors, spec) };
}

const keyOf = (spec: WeightSpec): string => spec.names.join(" ");

function found<T>(loaded: ReadonlyMap<string, T>, spec: WeightSpec): T {
  const value = loaded.get(keyOf(spec));
  if (!value) throw new Error(`${keyOf(spec)} was not in the load plan`);
  return value;
}

/** [columns] float32 that hold bfloat16 values: kernels read vectors as they are. */
async function loadVector(spec: WeightSpec, source: CheckpointTensor, { store }: LoadContext): Promise<Tensor> {
  const tensor = store.create(source.name, 1, spec.columns, "f32");
  store.write(tensor, bf16ArrayToF32(readPiece(source, 0, spec.columns, spec.columns)));
  return tensor;
}

async function loadMatrix(spec: WeightSpec, source: CheckpointTensor, context: LoadContext): Promise<Matrix> {
  const matrix = createMatrix(spec, source.name, context);
  if (spec.storedTransposed) await uploadTransposed(matrix, source, context);
  else await uploadRows(matrix, source, context);
  return matrix;
}

function createMatrix({ rows, columns }: WeightSpec, label: string, { store, maxBindingBytes }: LoadContext): Matrix {
  const partRows = Math.max(1, Math.floor(maxBindingBytes / (strideOf(columns, "bf16") * 2)));
  const parts: MatrixPart[] = [];
  for (let firstRow = 0; firstRow < rows; firstRow += partRows) {
    const count = Math.min(partRows, rows - firstRow);
    parts.push({ firstRow, tensor: store.create(`${label}[${firstRow}]`, count, columns, "bf16") });
  }
  return { rows, columns, parts };
}

async function uploadRows({ columns, parts }: Matrix, source: CheckpointTensor, context: LoadContext): Promise<void> {
  const stride = strideOf(columns, "bf16");
  for (const { firstRow, tensor } of parts) {
    for (const { first, count } of pieces(tensor.rows, Math.floor(PIECE_BYTES / bytesOfRow(source)))) {
      const values = readPiece(source, (firstRow + first) * columns, count * columns, columns, stride);
      context.store.write(tensor, values, first * tensor.rowBytes);
      await settle(values.byteLength, context);
    }
  }
}

/** The file has [in, out], the kernels want [out, in]: rows of the file go up as they are, and the device turns them. */
async function uploadTransposed(matrix: Matrix, source: CheckpointTensor, context: LoadContext): Promise<void> {
  const { commands, pipelines, store, upload } = context;
  const inStride = matrix.rows + (matrix.rows % 2);
  const constants = { IN_STRIDE: inStride, OUT_STRIDE: strideOf(matrix.columns, "bf16"), WORKGROUP };
  const pipeline = await pipelines.compile(transposeBf16, constants);
  const most = Math.floor(Math.min(upload.byteLength, PIECE_BYTES) / (inStride * 2));
  // An even number of the file's rows, since each word on the device holds two of them.
  for (const { first, count } of pieces(matrix.columns, most - (most % 2))) {
    const values = readPiece(source, first * matrix.rows, count * matrix.rows, matrix.rows, inStride);
    store.write(upload, values);
    for (const { firstRow, tensor } of matrix.parts) {
      const params = { ins: count, first_in: first, first_out: firstRow, outs: tensor.rows };
      commands.dispatch(pipeline, { x: upload, y: tensor }, params, params);
    }
    commands.flush();
    await settle(values.byteLength, context);
  }
}

/** `count` things, `most` at a time (but at least two). */
function* pieces(count: number, most: number): Generator<{ first: number; count: number }> {
  const step = Math.max(2, most);
  for (let first = 0; first < count; first += step) yield { first, count: Math.min(step, count - first) };
}

const bytesOfRow = ({ shape, begin, end }: CheckpointTensor): number => (end - begin) / (shape[0] || 1);

/** `count` values from `first` on as bfloat16: rows of `columns` values, each padded with zeros to `stride`. */
function readPiece(
  { file, begin, end, dtype, shape }: CheckpointTensor,
  first: number,
  count: number,
  columns: number,
  stride = columns,
): Uint16Array {
  const size = (end - begin) / shape.reduce((product, dimension) => product * dimension, 1);
  using range = mapRange(file.path, begin + first * size, count * size);
  const rows = count / columns;
  // writeBuffer wants whole words.
  const values = new Uint16Array(rows * stride + ((rows * stride) % 2));
  if (stride === columns) convertToBf16(dtype as FloatDtype, range.bytes, values.subarray(0, count));
  else {
    for (let row = 0; row < rows; row++) {
      const bytes = range.bytes.subarray(row * columns * size, (row + 1) * columns * size);
      convertToBf16(dtype as FloatDtype, bytes, values.subarray(row * stride, row * stride + columns));
    }
  }
  return values;
}

const unsettled = new WeakMap<Device, number>();

async function settle(bytes: number, { device }: LoadContext): Promise<void> {
  const gathered = (unsettled.get(device) ?? 0) + bytes;
  if (gathered >= RECLAIM_BYTES) await device.reclaim();
  unsettled.set(device, gathered >= RECLAIM_BYTES ? 0 : gathered);
}
