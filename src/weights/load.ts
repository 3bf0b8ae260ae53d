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
const RECLAIM_BYTES = 8 * 2 ** 20;

/**
 * Walks the plan: maps each tensor piece by piece, converts it to bfloat16, puts it on the device and forgets it.
 * @throws UserError `bad_model` when a file is no longer what its header said.
 */
export async function loadWeights(plan: LoadPlan, context: LoadContext): Promise<WeightSource> {
  const loader = new Loader(context);
  const matrices = new Map<string, Matrix>();
  const vectors = new Map<string, Tensor>();
  let readBytes = 0;
  for (const { source, specs } of plan.weights) {
    const [first] = specs;
    if (first!.kind === "matrix") {
      const matrix = await loader.matrix(first!, source);
      for (const spec of specs) matrices.set(keyOf(spec), matrix);
    } else {
      const vector = loader.vector(first!, source);
      for (const spec of specs) vectors.set(keyOf(spec), vector);
    }
    readBytes += source.end - source.begin;
    context.onProgress?.(readBytes, plan.readBytes);
  }
  await context.device.reclaim();
  return { matrix: (spec) => found(matrices, spec), vector: (spec) => found(vectors, spec) };
}

const keyOf = (spec: WeightSpec): string => spec.names.join(" ");

function found<T>(loaded: ReadonlyMap<string, T>, spec: WeightSpec): T {
  const value = loaded.get(keyOf(spec));
  if (!value) throw new Error(`${keyOf(spec)} was not in the load plan`);
  return value;
}

class Loader {
  readonly #context: LoadContext;
  /** One array for all pieces: garbage of this size gathers faster than it is collected. */
  #staging = new Uint16Array(0);
  #unsettledBytes = 0;

  constructor(context: LoadContext) {
    this.#context = context;
  }

  /** [columns] float32 that hold bfloat16 values: kernels read vectors as they are. */
  vector({ columns }: WeightSpec, source: CheckpointTensor): Tensor {
    const { store } = this.#context;
    const tensor = store.create(source.name, 1, columns, "f32");
    store.write(tensor, bf16ArrayToF32(this.#read(source, 0, 1, columns, columns).subarray(0, columns)));
    return tensor;
  }

  async matrix(spec: WeightSpec, source: CheckpointTensor): Promise<Matrix> {
    const matrix = this.#create(spec, source.name);
    if (spec.storedTransposed) await this.#uploadTransposed(matrix, source);
    else await this.#uploadRows(matrix, source);
    return matrix;
  }

  #create({ rows, columns }: WeightSpec, label: string): Matrix {
    const { store, maxBindingBytes } = this.#context;
    const partRows = Math.max(1, Math.floor(maxBindingBytes / (strideOf(columns, "bf16") * 2)));
    const parts: MatrixPart[] = [];
    for (let firstRow = 0; firstRow < rows; firstRow += partRows) {
      const count = Math.min(partRows, rows - firstRow);
      parts.push({ firstRow, tensor: store.create(`${label}[${firstRow}]`, count, columns, "bf16") });
    }
    return { rows, columns, parts };
  }

  async #uploadRows({ columns, parts }: Matrix, source: CheckpointTensor): Promise<void> {
    const most = Math.floor(PIECE_BYTES / (columns * bytesPerValue(source)));
    for (const { firstRow, tensor } of parts) {
      for (const { first, count } of pieces(tensor.rows, most)) {
        const values = this.#read(source, firstRow + first, count, columns, tensor.stride);
        this.#context.store.write(tensor, values, first * tensor.rowBytes);
        await this.#settle(values.byteLength);
      }
    }
  }

  /** The file has [in, out], the kernels want [out, in]: rows of the file go up as they are, and the device turns them. */
  async #uploadTransposed({ rows, columns, parts }: Matrix, source: CheckpointTensor): Promise<void> {
    const { commands, pipelines, store, upload } = this.#context;
    const inStride = rows + (rows % 2);
    const constants = { IN_STRIDE: inStride, OUT_STRIDE: strideOf(columns, "bf16"), WORKGROUP };
    const pipeline = await pipelines.compile(transposeBf16, constants);
    const most = Math.floor(Math.min(upload.byteLength, PIECE_BYTES) / (inStride * 2));
    // An even number of the file's rows, since each word on the device holds two of them.
    for (const { first, count } of pieces(columns, most - (most % 2))) {
      const values = this.#read(source, first, count, rows, inStride);
      store.write(upload, values);
      for (const { firstRow, tensor } of parts) {
        const params = { ins: count, first_in: first, first_out: firstRow, outs: tensor.rows };
        commands.dispatch(pipeline, { x: upload, y: tensor }, params, params);
      }
      commands.flush();
      await this.#settle(values.byteLength);
    }
  }

  /**
   * Rows of a tensor of the file as bfloat16, each padded with zeros from `columns` to `stride` values, and the whole to
   * an even number of them: writeBuffer wants words. They are good until the next piece is read.
   */
  #read(source: CheckpointTensor, firstRow: number, rows: number, columns: number, stride: number): Uint16Array {
    const dtype = source.dtype as FloatDtype; // the plan has checked it
    const rowBytes = columns * bytesPerValue(source);
    using range = mapRange(source.file.path, source.begin + firstRow * rowBytes, rows * rowBytes);
    const length = rows * stride + ((rows * stride) % 2);
    if (this.#staging.length < length) this.#staging = new Uint16Array(length);
    const values = this.#staging.subarray(0, length);
    if (stride === columns) convertToBf16(dtype, range.bytes, values.subarray(0, rows * columns));
    else {
      values.fill(0);
      for (let row = 0; row < rows; row++) {
        const bytes = range.bytes.subarray(row * rowBytes, (row + 1) * rowBytes);
        convertToBf16(dtype, bytes, values.subarray(row * stride, row * stride + columns));
      }
    }
    return values;
  }

  async #settle(writtenBytes: number): Promise<void> {
    this.#unsettledBytes += writtenBytes;
    if (this.#unsettledBytes < RECLAIM_BYTES) return;
    await this.#context.device.reclaim();
    this.#unsettledBytes = 0;
  }
}

/** `count` rows, `most` at a time (but at least two). */
function* pieces(count: number, most: number): Generator<{ first: number; count: number }> {
  const step = Math.max(2, most);
  for (let first = 0; first < count; first += step) yield { first, count: Math.min(step, count - first) };
}

const bytesPerValue = ({ dtype }: CheckpointTensor): number => (dtype === "F32" ? 4 : 2);
