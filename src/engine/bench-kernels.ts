import { ceilDiv } from "../base/bytes.ts";
import { Commands } from "../gpu/commands.ts";
import type { Device } from "../gpu/device.ts";
import { type Pipeline, PipelineCache } from "../gpu/kernel.ts";
import { strideOf, type Tensor, TensorStore } from "../gpu/tensor.ts";
import type { Encoding } from "../kernels/index.ts";
import { compileProducts, type Matrix, type MatrixPart } from "../nn/index.ts";
import { quantizeMatrix } from "../weights/quantize.ts";

/** A weight [outputs, columns] and the encodings in which it is multiplied. */
export interface BenchShape {
  readonly outputs: number;
  readonly columns: number;
  readonly encodings: readonly Encoding[];
  /** Rows of x; default: 1, 32, 128. One is what a token by itself has (gemv), the others are those of a prompt (gemm). */
  readonly rows?: readonly number[];
}

/** One kernel over one weight: the rows of each encoding were timed in the same rounds. */
export interface KernelTiming {
  readonly kernel: "gemv" | "gemm";
  readonly rows: number;
  readonly outputs: number;
  readonly columns: number;
  readonly encoding: Encoding;
  /** Codes and scales of the weight. */
  readonly weightBytes: number;
  /** Of one dispatch: the median of the rounds. */
  readonly seconds: number;
  readonly gigabytesPerSecond: number;
  readonly gigaflopsPerSecond: number;
  /** The median, over the rounds, of the time over that of bfloat16 in the same round; null where that did not run. */
  readonly timeToBf16: number | null;
}

const ROWS = [1, 32, 128];
/** A weight lies on the device in copies of this size together, used one after the other, so that none is in a cache. */
export const COPIES_BYTES = 64 * 2 ** 20;
/** Of a weight so small that it is in a cache anyway. */
const MAX_COPIES = 256;
/** As many dispatches to a submit as take about this long: what a submit costs by itself does not show. */
export const ROUND_SECONDS = 0.03;
/** The most dispatches to a submit: what the uniforms of one hold. */
const MAX_DISPATCHES = 1024;

/** Times gemv and gemm over each shape. `runs`: rounds that count, after one that does not. */
export async function* timeKernels(
  device: Device,
  shapes: readonly BenchShape[],
  runs: number,
): AsyncGenerator<KernelTiming> {
  const commands = new Commands(device);
  try {
    for (const shape of shapes) {
      const store = new TensorStore(device);
      try {
        const weights = new Map<Encoding, MatrixPart[]>();
        for (const encoding of shape.encodings) {
          weights.set(encoding, await copiesOf(shape, encoding, device, store, commands));
        }
        for (const rows of shape.rows ?? ROWS)
          yield* timeShape(shape, rows, weights, runs, { device, store, commands });
      } finally {
        store.destroyAll();
        await device.reclaim();
      }
    }
  } finally {
    commands.destroy();
  }
}

interface Context {
  readonly device: Device;
  readonly store: TensorStore;
  readonly commands: Commands;
}

/** The same weight many times over: made and encoded once, as a load does it, then copied. */
async function copiesOf(
  { outputs, columns }: BenchShape,
  encoding: Encoding,
  device: Device,
  store: TensorStore,
  commands: Commands,
): Promise<MatrixPart[]> {
  const tensor = store.create("weight", outputs, columns, "bf16");
  store.write(tensor, randomBf16(outputs, columns, tensor.stride));
  const plain: Matrix = { rows: outputs, columns, encoding: "bf16", parts: [{ firstRow: 0, rows: outputs, tensor }] };
  const context = { store, commands, pipelines: PipelineCache.of(device) };
  const { parts } = encoding === "bf16" ? plain : await quantizeMatrix(plain, encoding, "weight", context);
  const [first] = parts;
  const copies: MatrixPart[] = [first!];
  const { tensor: values, scales } = first!;
  const count = Math.min(ceilDiv(COPIES_BYTES, bytesOf(first!)), MAX_COPIES);
  if (count === 1) return copies;

  const valueBytes = await commands.read(values);
  const scaleBytes = scales && (await commands.read(scales));
  const copy = (from: Tensor, bytes: Uint8Array) => {
    const to = store.create(from.label, from.rows, from.columns, from.type);
    store.write(to, bytes);
    return to;
  };
  while (copies.length < count) {
    const part = { ...first!, tensor: copy(values, valueBytes) };
    copies.push(scales ? { ...part, scales: copy(scales, scaleBytes!) } : part);
  }
  await device.reclaim();
  return copies;
}

const bytesOf = ({ tensor, scales }: MatrixPart): number => tensor.byteLength + (scales?.byteLength ?? 0);

async function* timeShape(
  { outputs, columns, encodings }: BenchShape,
  rows: number,
  weights: ReadonlyMap<Encoding, readonly MatrixPart[]>,
  runs: number,
  { device, store, commands }: Context,
): AsyncGenerator<KernelTiming> {
  const x = store.create("x", rows, columns, "f32");
  store.write(
    x,
    Float32Array.from({ length: rows * x.stride }, (_, at) => (at % x.stride < columns ? 1 : 0)),
  );
  const y = store.create("y", rows, outputs, "f32");
  const nothing = store.create("nothing", 1, 4, "f32");
  const kernel = rows === 1 ? "gemv" : "gemm";
  const lanes = await Promise.all(
    encodings.map(async (encoding) => {
      const pipeline = await compile(kernel, encoding, outputs, columns, device);
      const copies = weights.get(encoding)!;
      return new Lane(encoding, copies, pipeline, { x, bias: nothing, y }, { rows, outputs }, commands);
    }),
  );

  for (const lane of lanes) await lane.warmUp();
  const rounds = new Map(encodings.map((encoding) => [encoding, [] as number[]]));
  for (let run = 0; run < runs; run++) {
    for (const lane of lanes) rounds.get(lane.encoding)!.push(await lane.time());
  }
  for (const { encoding, weightBytes } of lanes) {
    const seconds = median(rounds.get(encoding)!);
    const bf16 = rounds.get("bf16");
    const ratios = bf16?.map((time, round) => rounds.get(encoding)![round]! / time);
    yield {
      kernel,
      rows,
      outputs,
      columns,
      encoding,
      weightBytes,
      seconds,
      gigabytesPerSecond: weightBytes / seconds / 1e9,
      gigaflopsPerSecond: (2 * rows * outputs * columns) / seconds / 1e9,
      timeToBf16: ratios ? median(ratios) : null,
    };
  }
  for (const tensor of [x, y, nothing]) store.destroy(tensor);
}

type Dims = { rows: number; outputs: number };
type Bindings = Record<"weight" | "scales" | "x" | "bias" | "y", Tensor>;
type LinearPipeline = Pipeline<keyof Bindings, "rows" | "outputs" | "first_output", Dims>;

/** One encoding in the race. */
class Lane {
  #next = 0;
  #dispatches = 1;

  constructor(
    readonly encoding: Encoding,
    private readonly copies: readonly MatrixPart[],
    private readonly pipeline: LinearPipeline,
    private readonly tensors: Omit<Bindings, "weight" | "scales">,
    private readonly dims: Dims,
    private readonly commands: Commands,
  ) {}

  get weightBytes(): number {
    return bytesOf(this.copies[0]!);
  }

  /** Compiles what a driver compiles at first use, and finds how many dispatches fill a round. */
  async warmUp(): Promise<void> {
    await this.time();
    while (this.#dispatches < MAX_DISPATCHES) {
      const wanted = Math.ceil(ROUND_SECONDS / (await this.time()));
      if (wanted <= this.#dispatches) break;
      this.#dispatches = Math.min(wanted, this.#dispatches * 8, MAX_DISPATCHES);
    }
  }

  /** Seconds of one dispatch, from the submit until the device is done, over as many as fill a round. */
  async time(): Promise<number> {
    for (let i = 0; i < this.#dispatches; i++) {
      const { tensor, scales } = this.copies[this.#next++ % this.copies.length]!;
      const bindings = { ...this.tensors, weight: tensor, scales: scales ?? this.tensors.bias };
      this.commands.dispatch(this.pipeline, bindings, { ...this.dims, first_output: 0 }, this.dims);
    }
    const began = performance.now();
    await this.commands.finish();
    return (performance.now() - began) / 1000 / this.#dispatches;
  }
}

async function compile(
  kernel: "gemv" | "gemm",
  encoding: Encoding,
  outputs: number,
  columns: number,
  device: Device,
): Promise<LinearPipeline> {
  const stride = strideOf(columns, "bf16");
  const constants = {
    WEIGHT_STRIDE: stride,
    COLUMNS: columns,
    STRIDE_OUT: strideOf(outputs, "f32"),
    OUT_AT: 0,
    HAS_BIAS: 0,
    ROUND: 0,
  };
  const { few, many } = await compileProducts(encoding, constants, { device, pipelines: PipelineCache.of(device) });
  return kernel === "gemm" ? many : few;
}

/** Values of about ±0.05 with every sign and many exponents: what they are does not matter, but no NaN shall be there. */
function randomBf16(rows: number, columns: number, stride: number): Uint16Array {
  const values = new Uint16Array(rows * stride + ((rows * stride) % 2));
  let state = 1;
  for (let at = 0; at < rows * stride; at++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    if (at % stride < columns) values[at] = ((state >>> 16) & 0x8000) | (0x3c00 + ((state >>> 20) & 0x1ff));
  }
  return values;
}

const median = (values: readonly number[]): number => {
  const sorted = values.toSorted((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)]! + sorted[Math.ceil((sorted.length - 1) / 2)]!) / 2;
};
