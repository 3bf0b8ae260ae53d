import { Commands } from "../../gpu/commands.ts";
import type { Device } from "../../gpu/device.ts";
import { type Kernel, PipelineCache } from "../../gpu/kernel.ts";
import { type ElementType, type Tensor, TensorStore } from "../../gpu/tensor.ts";
import { bitsOfBf16, roundBf16 } from "../../kernels/reference/bf16.ts";
import type { Matrix } from "../../kernels/reference/matrix.ts";

/** What a place holds that nothing may read or write: NaN as float32, as either bfloat16, and no index of anything. */
const GUARD = 0x7fc17fc1;
const GUARD_ROWS = 2;

const ARRAYS = { f32: Float32Array, bf16: Uint16Array, u32: Uint32Array } as const;
export type Row = Float32Array | Uint16Array | Uint32Array;

/**
 * A device with matrices on it. Each has guard rows behind its last, which hold NaN: a kernel that reads them shows, and
 * `read` sees whether one wrote there or changed a zero in the padding of a row.
 */
export class Bench {
  readonly #pipelines: PipelineCache;
  readonly #store: TensorStore;
  readonly #commands: Commands;
  readonly #rows = new Map<Tensor, number>();

  constructor(readonly device: Device) {
    this.#pipelines = PipelineCache.of(device);
    this.#store = new TensorStore(device);
    this.#commands = new Commands(device);
  }

  /** Values as they are (`f32`, `u32`), or rounded to bfloat16. */
  input(values: Matrix, type: ElementType = "f32"): Tensor {
    const tensor = this.output(values.length, values[0]!.length, type);
    const data = new ARRAYS[type](wholeWords(values.length * tensor.stride));
    values.forEach((row, index) => {
      data.set(type === "bf16" ? Array.from(row, (v) => bitsOfBf16(roundBf16(v))) : row, index * tensor.stride);
    });
    this.#store.write(tensor, data);
    return tensor;
  }

  /** Guards in every place that a kernel is to fill. */
  output(rows: number, columns: number, type: ElementType = "f32"): Tensor {
    const tensor = this.#store.create("test", rows + GUARD_ROWS, columns, type);
    const words = new Uint32Array(tensor.byteLength / 4).fill(GUARD);
    const elements = type === "bf16" ? new Uint16Array(words.buffer) : words;
    for (let row = 0; row < rows; row++) elements.fill(0, row * tensor.stride + columns, (row + 1) * tensor.stride);
    this.#store.write(tensor, words);
    this.#rows.set(tensor, rows);
    return tensor;
  }

  /** Records a dispatch; it runs with the next `read`. */
  async run<B extends string, C extends string, P extends string, D>(
    kernel: Kernel<B, C, P, D>,
    constants: Readonly<Record<C, number>>,
    bindings: Readonly<Record<B, Tensor>>,
    params: Readonly<Record<P, number>>,
    dims: D,
  ): Promise<void> {
    this.#commands.dispatch(await this.#pipelines.compile(kernel, constants), bindings, params, dims);
  }

  /** The rows of a tensor. Throws an Error if anything else of it has changed. */
  async read(tensor: Tensor): Promise<Row[]> {
    const rows = this.#rows.get(tensor)!;
    const { buffer } = await this.#commands.read(tensor);
    const all = new ARRAYS[tensor.type](buffer);
    const lines = Array.from({ length: rows }, (_, row) =>
      all.subarray(row * tensor.stride, (row + 1) * tensor.stride),
    );
    const padded = lines.findIndex((line) => line.subarray(tensor.columns).some((value) => value !== 0));
    if (padded >= 0) throw new Error(`the zeros behind the ${tensor.columns} columns of row ${padded} were changed`);
    const behind = new Uint32Array(buffer, rows * tensor.rowBytes).findIndex((word) => word !== GUARD);
    if (behind >= 0) throw new Error(`word ${behind} behind the ${rows} rows of a tensor was changed`);
    return lines.map((line) => line.subarray(0, tensor.columns));
  }

  /** Between two tests: forgets the tensors. */
  async clear(): Promise<void> {
    this.#rows.clear();
    this.#store.destroyAll();
    await this.device.reclaim();
  }

  destroy(): void {
    this.#store.destroyAll();
    this.#commands.destroy();
  }
}

const wholeWords = (elements: number): number => elements + (elements % 2);

/** Whether a place still holds what `Bench.output` put there. */
export const isUnwritten = (value: number): boolean => Number.isNaN(value) || value === GUARD;
