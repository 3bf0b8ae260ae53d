import { expect } from "bun:test";
import { Commands } from "../../src/gpu/commands.ts";
import type { Device } from "../../src/gpu/device.ts";
import { type Kernel, PipelineCache } from "../../src/gpu/kernel.ts";
import { type ElementType, type Tensor, TensorStore } from "../../src/gpu/tensor.ts";
import type { Heads } from "../reference/attention.ts";
import { bitsOfBf16, roundBf16 } from "../reference/bf16.ts";
import { type Matrix, matrixOf } from "../reference/matrix.ts";
import { seededRandom } from "../support/safetensors.ts";

/** Half a unit in the last place of a float32: the relative error of one rounding. A unit in the last place is 2 U. */
export const U = 2 ** -24;
/** Results below the smallest normal float32 may be flushed to zero. */
export const SMALLEST_NORMAL = 2 ** -126;

/** What a place holds that nothing may read or write: NaN as float32, as either bfloat16, and no index of anything. */
const GUARD = 0x7fc17fc1;
const GUARD_ROWS = 2;

const ARRAYS = { f32: Float32Array, bf16: Uint16Array, u32: Uint32Array } as const;
type Row = Float32Array | Uint16Array | Uint32Array;

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

  /** The rows of a tensor; fails if anything else of it has changed. */
  async read(tensor: Tensor): Promise<Row[]> {
    const rows = this.#rows.get(tensor)!;
    const { buffer } = await this.#commands.read(tensor);
    const all = new ARRAYS[tensor.type](buffer);
    const lines = Array.from({ length: rows }, (_, row) =>
      all.subarray(row * tensor.stride, (row + 1) * tensor.stride),
    );
    const padding = lines.map((line) => line.subarray(tensor.columns));
    expect(padding.findIndex((columns) => columns.some((value) => value !== 0))).toBe(-1);
    const behind = new Uint32Array(buffer, rows * tensor.rowBytes);
    expect(behind.findIndex((word) => word !== GUARD)).toBe(-1);
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

/** Every value within its bound. A failure names the first that is not. */
export function expectWithin(actual: Matrix, expected: Matrix, bound: (row: number, column: number) => number): void {
  expect(actual.length).toBe(expected.length);
  let wrong: object | undefined;
  expected.forEach((values, row) => {
    if (actual[row]!.length !== values.length) wrong ??= { row, columns: actual[row]!.length, not: values.length };
    for (let column = 0; column < values.length && !wrong; column++) {
      const [is, should, allowed] = [actual[row]![column]!, values[column]!, bound(row, column)];
      if (!(Math.abs(is - should) <= allowed)) wrong = { row, column, is, should, allowed, off: is - should };
    }
  });
  expect(wrong).toBeUndefined();
}

/** Every value the same, to the bit. A failure names the first that is not. */
export function expectSame(actual: Matrix, expected: Matrix): void {
  expect(actual.length).toBe(expected.length);
  let wrong: object | undefined;
  expected.forEach((values, row) => {
    if (actual[row]!.length !== values.length) wrong ??= { row, columns: actual[row]!.length, not: values.length };
    for (let column = 0; column < values.length && !wrong; column++) {
      const [is, should] = [actual[row]![column]!, values[column]!];
      if (!Object.is(is, should)) wrong = { row, column, is, should };
    }
  });
  expect(wrong).toBeUndefined();
}

/** Repeatable values, normally distributed about zero. */
export class Sampler {
  readonly #random: () => number;

  constructor(seed: number) {
    this.#random = seededRandom(seed);
  }

  integer = (below: number): number => Math.floor(this.#random() * below);

  normal = (): number => Math.sqrt(-2 * Math.log(1 - this.#random())) * Math.cos(2 * Math.PI * this.#random());

  f32 = (rows: number, columns: number, deviation = 1): number[][] =>
    matrixOf(rows, columns, () => Math.fround(this.normal() * deviation));

  bf16 = (rows: number, columns: number, deviation = 1): number[][] =>
    matrixOf(rows, columns, () => roundBf16(this.normal() * deviation));
}

/** [begin, begin + 1, … end) */
export const range = (begin: number, end: number): number[] => Array.from({ length: end - begin }, (_, i) => begin + i);

export const absolute = (x: Matrix): number[][] => x.map((row) => Array.from(row, Math.abs));

/** A token's keys (or values) as they lie in the cache: two bfloat16 to a word, a head of odd size ends with a zero. */
export const cacheRow = (heads: Heads[number]): number[] =>
  heads.flatMap((values) =>
    range(0, Math.ceil(values.length / 2)).map(
      (word) => (bitsOfBf16(values[word * 2]!) | (bitsOfBf16(values[word * 2 + 1] ?? 0) << 16)) >>> 0,
    ),
  );
