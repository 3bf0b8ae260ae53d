import { bytesOf } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Commands } from "../gpu/commands.ts";
import type { Device } from "../gpu/device.ts";
import type { PipelineCache } from "../gpu/kernel.ts";
import { strideOf, type Tensor, type TensorStore } from "../gpu/tensor.ts";
import { TRANSPOSE_ROWS, transposeBf16, WORKGROUP } from "../kernels/index.ts";
import type { Encoding, ExpertPart, ExpertStack, Matrix, MatrixPart, WeightSource, WeightSpec } from "../nn/index.ts";
import { bf16ArrayToF32, convertToBf16, type FloatDtype } from "../quant/bf16.ts";
import { fp8ToBf16 } from "../quant/fp8.ts";
import type { CheckpointTensor } from "../safetensors/checkpoint.ts";
import { RangeReader } from "../safetensors/range-reader.ts";
import { placeIn, rowParts, stackParts } from "./experts.ts";
import type { LoadPlan } from "./plan.ts";
import { codeWords, NF4_BLOCK, type Quantized, quantizeMatrix, scaleCount, splitRows } from "./quantize.ts";
import { parseState, repack4, type StoredWeight, unnest } from "./stored.ts";

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

/** A tensor goes to the device in pieces of about this many bytes, so that memory stays small whatever its size. */
const PIECE_BYTES = 2 ** 20;
/** A file is read for about this many bytes at a time, so that they are still in the processor's cache when converted. */
const READ_BYTES = 2 ** 18;
/** A device may hold on to written bytes until it is done with them: twice as many as these are let gather. */
const SETTLE_BYTES = 2 * 2 ** 20;
/** What a driver may hold of written bytes at a time while weights are loaded. */
export const IN_FLIGHT_BYTES = 2 * SETTLE_BYTES + PIECE_BYTES;

/**
 * Walks the plan: reads each tensor piece by piece, converts it to bfloat16, puts it on the device and forgets it.
 * @throws UserError `bad_model` when a file is no longer what its header said.
 */
export async function loadWeights(plan: LoadPlan, context: LoadContext): Promise<WeightSource> {
  using loader = new Loader(context);
  const matrices = new Map<string, Matrix>();
  const vectors = new Map<string, Tensor>();
  let readBytes = 0;
  for (const { source, specs, encoding, stored, blockScales } of plan.weights) {
    const [first] = specs;
    loader.useBlockScales(blockScales);
    if (first!.stack) await loader.expert(first!, source, encoding, stored);
    else if (first!.kind === "matrix") {
      const matrix = stored
        ? await loader.storedMatrix(first!, source, stored)
        : await loader.matrix(first!, source, encoding);
      for (const spec of specs) matrices.set(keyOf(spec), matrix);
    } else {
      const vector = loader.vector(first!, source);
      for (const spec of specs) vectors.set(keyOf(spec), vector);
    }
    readBytes += source.end - source.begin;
    context.onProgress?.(readBytes, plan.readBytes);
  }
  await loader.finish();
  return {
    matrix: (spec) => found(matrices, spec),
    experts: (stack) => loader.stack(stack),
    vector: (spec) => found(vectors, spec),
  };
}

const keyOf = (spec: WeightSpec): string => spec.names.join(" ");

function found<T>(loaded: ReadonlyMap<string, T>, spec: WeightSpec): T {
  const value = loaded.get(keyOf(spec));
  if (!value) throw new Error(`${keyOf(spec)} was not in the load plan`);
  return value;
}

class Loader implements Disposable {
  readonly #context: LoadContext;
  readonly #reader = new RangeReader();
  /** One array each for all pieces: garbage of this size gathers faster than it is collected. */
  #staging = new Uint16Array(0);
  #raw = new Uint8Array(0);
  #unsettledBytes = 0;
  #settled: Promise<void> = Promise.resolve();
  #blockScales = new Float32Array(0);
  readonly #stacks = new Map<string, ExpertStack>();

  constructor(context: LoadContext) {
    this.#context = context;
  }

  [Symbol.dispose](): void {
    this.#reader[Symbol.dispose]();
  }

  /** Resolves when everything is on the device, and what it took on the way is given back. */
  finish(): Promise<void> {
    return this.#context.device.reclaim();
  }

  /** The factors of the FP8 matrix that comes next, if it is one. */
  useBlockScales(source: CheckpointTensor | undefined): void {
    if (source) this.#blockScales = new Float32Array(this.#bytes(source).buffer);
  }

  /** [columns] float32 that hold bfloat16 values: kernels read vectors as they are. */
  vector({ columns, keepsF32 }: WeightSpec, source: CheckpointTensor): Tensor {
    const { store } = this.#context;
    const tensor = store.create(source.name, 1, columns, "f32");
    if (keepsF32 && source.dtype === "F32") {
      store.write(tensor, this.#bytes(source));
      return tensor;
    }
    store.write(tensor, bf16ArrayToF32(this.#read(source, 0, 1, columns, columns).subarray(0, columns)));
    return tensor;
  }

  async matrix(spec: WeightSpec, source: CheckpointTensor, encoding: Encoding): Promise<Matrix> {
    const matrix = this.#create(spec, source.name, encoding);
    if (spec.storedTransposed) await this.#uploadTransposed(matrix, source);
    else for (const part of matrix.parts) await this.#uploadRows(spec.columns, source, { ...part, at: 0 });
    if (encoding === "bf16") return matrix;
    const quantized = await quantizeMatrix(matrix, encoding, source.name, this.#context);
    await this.#context.device.reclaim(); // or two matrices in bfloat16 were there at a time, and one is planned
    return quantized;
  }

  /** Into the stack of its layer's experts. What is quantized lies beside it for a moment. */
  async expert(spec: WeightSpec, source: CheckpointTensor, encoding: Encoding, stored?: StoredWeight): Promise<void> {
    const { parts } = this.#stackOf(spec, encoding);
    if (encoding === "bf16") {
      for (const part of parts.filter((part) => placeIn(part, spec) !== undefined)) {
        await this.#uploadRows(spec.columns, source, { ...part, at: placeIn(part, spec)! });
      }
      return;
    }
    const { store, commands, device } = this.#context;
    const matrix = stored ? await this.storedMatrix(spec, source, stored) : await this.matrix(spec, source, encoding);
    for (const from of matrix.parts) {
      const to = parts.find((part) => placeIn(part, spec, from.firstRow) !== undefined)!;
      const row = placeIn(to, spec, from.firstRow)!;
      commands.copy(from.tensor, 0, to.tensor, row * to.tensor.rowBytes, from.rows * from.tensor.rowBytes);
      const scalesBefore = scaleCount(row, spec.columns, encoding);
      commands.copy(from.scales!, 0, to.scales!, scalesBefore * 4, from.scales!.columns * 4);
    }
    commands.flush();
    for (const { tensor, scales } of matrix.parts) {
      store.destroy(tensor);
      if (scales) store.destroy(scales);
    }
    await device.reclaim();
  }

  stack(name: string): ExpertStack {
    const stack = this.#stacks.get(name);
    if (!stack) throw new Error(`${name} was not in the load plan`);
    return stack;
  }

  /** With room for all experts, made when the first of them comes. */
  #stackOf(spec: WeightSpec, encoding: Encoding): ExpertStack {
    const { name } = spec.stack!;
    const made = this.#stacks.get(name);
    if (made) return made;
    const { store, maxBindingBytes } = this.#context;
    const { columns } = spec;
    const parts = stackParts(spec, encoding, maxBindingBytes).map((part): ExpertPart => {
      const rows = part.experts * part.rows;
      const label = `${name}[${part.firstExpert}, ${part.firstRow}]`;
      if (encoding === "bf16") return { ...part, tensor: store.create(label, rows, columns, "bf16") };
      return {
        ...part,
        tensor: store.create(label, rows, codeWords(columns, encoding), "u32"),
        scales: store.create(`${label} scales`, 1, scaleCount(rows, columns, encoding), "f32"),
      };
    });
    const stack = { encoding, parts };
    this.#stacks.set(name, stack);
    return stack;
  }

  /** Codes and scales as the checkpoint has them. */
  async storedMatrix(spec: WeightSpec, source: CheckpointTensor, stored: StoredWeight): Promise<Matrix> {
    const { rows, columns } = spec;
    const { encoding } = stored;
    if (stored.layout) checkLayout(this.#bytes(stored.layout), stored.layout);
    const words = codeWords(columns, encoding);
    const scales = this.#scales(spec, stored);
    const parts = this.#partsOf(
      rows,
      spec.stack ? strideOf(columns, "bf16") * 2 : words * 4,
      stepOf(spec, encoding),
    ).map(({ firstRow, count }): MatrixPart => {
      const label = `${source.name}[${firstRow}]`;
      const firstScale = encoding === "int8" ? firstRow : (firstRow * columns) / NF4_BLOCK;
      const some = scales.slice(firstScale, firstScale + scaleCount(count, columns, encoding));
      const part = {
        firstRow,
        rows: count,
        tensor: this.#context.store.create(label, count, words, "u32"),
        scales: this.#context.store.create(`${label} scales`, 1, some.length, "f32"),
      };
      this.#context.store.write(part.scales, some);
      return part;
    });
    for (const part of parts) await this.#uploadCodes(part, columns, source, encoding);
    return { rows, columns, encoding, parts };
  }

  #scales(spec: WeightSpec, stored: StoredWeight): Float32Array {
    const state = stored.state && parseState(this.#bytes(stored.state), spec, stored);
    const bytes = this.#bytes(stored.scales);
    if (!stored.nested || !state) return new Float32Array(bytes.buffer);
    const { absmax, map } = stored.nested;
    return unnest(
      bytes,
      new Float32Array(this.#bytes(absmax).buffer),
      new Float32Array(this.#bytes(map).buffer),
      state,
    );
  }

  async #uploadCodes(part: MatrixPart, columns: number, source: CheckpointTensor, encoding: Quantized): Promise<void> {
    const words = part.tensor.stride;
    const perByte = encoding === "int8" ? 1 : 2;
    for (const { first, count } of pieces(part.rows, Math.floor((PIECE_BYTES * perByte) / columns), 2)) {
      const firstCode = (part.firstRow + first) * columns;
      const begin = Math.floor(firstCode / perByte);
      const bytes = new Uint8Array(Math.ceil((firstCode + count * columns) / perByte) - begin);
      this.#reader.read(source.file, source.begin + begin, bytes);
      const packed =
        encoding === "int8"
          ? padRows(bytes, count, columns, words * 4)
          : repack4(bytes, firstCode % 2, count, columns, words, encoding);
      this.#context.store.write(part.tensor, packed, first * part.tensor.rowBytes);
      await this.#settle(packed.byteLength);
    }
  }

  /** A small tensor, whole. */
  #bytes({ file, begin, end }: CheckpointTensor): Uint8Array<ArrayBuffer> {
    const bytes = new Uint8Array(end - begin);
    this.#reader.read(file, begin, bytes);
    return bytes;
  }

  /** In bfloat16, split so that each part can be bound and, later, encoded by itself. */
  #create(spec: WeightSpec, label: string, encoding: Encoding): Matrix {
    const { rows, columns } = spec;
    const { store } = this.#context;
    const parts = this.#partsOf(rows, strideOf(columns, "bf16") * 2, stepOf(spec, encoding)).map(
      ({ firstRow, count }): MatrixPart => {
        const tensor = store.create(`${label}[${firstRow}]`, count, columns, "bf16");
        return { firstRow, rows: count, tensor };
      },
    );
    return { rows, columns, encoding: "bf16", parts };
  }

  #partsOf(rows: number, rowBytes: number, step: number): { firstRow: number; count: number }[] {
    return rowParts(rows, rowBytes, step, this.#context.maxBindingBytes);
  }

  /** Rows of the file from `firstRow` on to those of a tensor from `at` on. */
  async #uploadRows(
    columns: number,
    source: CheckpointTensor,
    { firstRow, rows, tensor, at }: { firstRow: number; rows: number; tensor: Tensor; at: number },
  ): Promise<void> {
    const most = Math.floor(PIECE_BYTES / (columns * bytesPerValue(source)));
    for (const { first, count } of pieces(rows, most, 2)) {
      const values = this.#read(source, firstRow + first, count, columns, tensor.stride);
      this.#context.store.write(tensor, values, (at + first) * tensor.rowBytes);
      await this.#settle(values.byteLength);
    }
  }

  /** The file has [in, out], the kernels want [out, in]: rows of the file go up as they are, and the device turns them. */
  async #uploadTransposed({ rows, columns, parts }: Matrix, source: CheckpointTensor): Promise<void> {
    const { commands, pipelines, store, upload } = this.#context;
    const inStride = rows + (rows % 2);
    const constants = { IN_STRIDE: inStride, OUT_STRIDE: strideOf(columns, "bf16"), WORKGROUP };
    const pipeline = await pipelines.compile(transposeBf16, constants);
    const most = Math.floor(Math.min(upload.byteLength, PIECE_BYTES) / (inStride * 2));
    for (const { first, count } of pieces(columns, most - (most % TRANSPOSE_ROWS), TRANSPOSE_ROWS)) {
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
    const length = rows * stride + ((rows * stride) % 2);
    if (this.#staging.length < length) this.#staging = new Uint16Array(length);
    const values = this.#staging.subarray(0, length);
    if (stride !== columns) values.fill(0);
    const rowBytes = columns * bytesPerValue(source);
    for (const { first, count } of pieces(rows, Math.floor(READ_BYTES / rowBytes), 1)) {
      const begin = source.begin + (firstRow + first) * rowBytes;
      const target = values.subarray(first * stride, (first + count) * stride);
      if (source.dtype === "F8_E4M3") this.#convertFp8(source, begin, target, firstRow + first, columns, stride);
      else this.#convert(source, begin, target, columns, stride);
    }
    return values;
  }

  #convertFp8(
    { file }: CheckpointTensor,
    begin: number,
    values: Uint16Array,
    firstRow: number,
    columns: number,
    stride: number,
  ): void {
    const bytes = Math.floor(values.length / stride) * columns;
    if (this.#raw.length < bytes) this.#raw = new Uint8Array(bytes);
    const codes = this.#raw.subarray(0, bytes);
    this.#reader.read(file, begin, codes);
    fp8ToBf16(codes, { firstRow, columns, stride }, this.#blockScales, values);
  }

  /** Fills rows of `stride` values with `columns` values each, which are those of the file from `begin` on. */
  #convert(source: CheckpointTensor, begin: number, values: Uint16Array, columns: number, stride: number): void {
    const dtype = source.dtype as FloatDtype; // the plan has checked it
    if (dtype === "BF16" && stride === columns) return this.#reader.read(source.file, begin, bytesOf(values));
    const rowBytes = columns * bytesPerValue(source);
    const rows = values.length / stride;
    if (this.#raw.length < rows * rowBytes) this.#raw = new Uint8Array(rows * rowBytes);
    const raw = this.#raw.subarray(0, rows * rowBytes);
    this.#reader.read(source.file, begin, raw);
    if (stride === columns) return convertToBf16(dtype, raw, values);
    for (let row = 0; row < rows; row++) {
      const target = values.subarray(row * stride, row * stride + columns);
      convertToBf16(dtype, raw.subarray(row * rowBytes, (row + 1) * rowBytes), target);
    }
  }

  /** While the device takes in what was written, the next pieces are read: it is waited for one round later. */
  async #settle(writtenBytes: number): Promise<void> {
    this.#unsettledBytes += writtenBytes;
    if (this.#unsettledBytes < SETTLE_BYTES) return;
    this.#unsettledBytes = 0;
    const earlier = this.#settled;
    this.#settled = this.#context.device.reclaim();
    this.#settled.catch(() => {}); // nobody waits for it where a read fails meanwhile
    await earlier;
  }
}

/** bitsandbytes' layouts 1 to 3 are of old GPUs, and it refuses them itself. */
function checkLayout([layout]: Uint8Array, { name, file }: CheckpointTensor): void {
  if (layout === 0) return;
  const hint = "save the model again with a newer bitsandbytes";
  throw new UserError(
    "bad_model",
    `${file.name}: tensor ${name} is ${layout}, and only row-major codes (0) are read`,
    hint,
  );
}

/** Rows of `columns` bytes, each filled up with zeros to `stride`. */
function padRows(bytes: Uint8Array, rows: number, columns: number, stride: number): Uint8Array {
  if (stride === columns) return bytes;
  const padded = new Uint8Array(rows * stride);
  for (let row = 0; row < rows; row++) padded.set(bytes.subarray(row * columns, (row + 1) * columns), row * stride);
  return padded;
}

/** `count` rows, `most` at a time (but at least `least`). */
function* pieces(count: number, most: number, least: number): Generator<{ first: number; count: number }> {
  const step = Math.max(least, most);
  for (let first = 0; first < count; first += step) yield { first, count: Math.min(step, count - first) };
}

const bytesPerValue = ({ dtype }: CheckpointTensor): number => (dtype === "F32" ? 4 : dtype === "F8_E4M3" ? 1 : 2);

/** Rows that a split leaves together: those of a head, and where a block of values begins anew. */
function stepOf({ columns, rowsTogether = 1 }: WeightSpec, encoding: Encoding): number {
  let step = rowsTogether;
  while (step % splitRows(columns, encoding) !== 0) step += rowsTogether;
  return step;
}
