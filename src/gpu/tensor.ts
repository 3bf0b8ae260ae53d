import { bytesOf, roundUp } from "../base/bytes.ts";
import type { Device } from "./device.ts";

/** `f32` and `bf16` rows are padded to whole 16-byte loads of bfloat16; `u32` rows are packed. */
export type ElementType = "f32" | "bf16" | "u32";

const BYTES: Record<ElementType, number> = { f32: 4, bf16: 2, u32: 4 };

/** Columns that a row of this type takes in memory. The columns behind the last are zero and stay zero. */
export const strideOf = (columns: number, type: ElementType): number =>
  type === "u32" ? columns : roundUp(columns, 8);

export const tensorBytes = (rows: number, columns: number, type: ElementType): number =>
  roundUp(rows * strideOf(columns, type) * BYTES[type], 16);

/**
 * A row-major matrix on the device. Only this folder looks at its buffer, so that the layers above also fit devices
 * whose fastest container is another one.
 */
export class Tensor {
  readonly stride: number;
  readonly byteLength: number;

  constructor(
    readonly label: string,
    readonly rows: number,
    readonly columns: number,
    readonly type: ElementType,
    readonly buffer: GPUBuffer,
  ) {
    this.stride = strideOf(columns, type);
    this.byteLength = tensorBytes(rows, columns, type);
  }

  /** Bytes from one row to the next. */
  get rowBytes(): number {
    return this.stride * BYTES[this.type];
  }
}

/** Makes tensors on one device and keeps count of what they take. */
export class TensorStore {
  readonly #device: Device;
  readonly #live = new Set<Tensor>();
  #allocatedBytes = 0;

  constructor(device: Device) {
    this.#device = device;
  }

  get allocatedBytes(): number {
    return this.#allocatedBytes;
  }

  /** A tensor of zeros. Running out of memory shows in an `out-of-memory` error scope, not here. */
  create(label: string, rows: number, columns: number, type: ElementType): Tensor {
    const buffer = this.#device.createBuffer({
      label,
      size: tensorBytes(rows, columns, type),
      usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
    });
    const tensor = new Tensor(label, rows, columns, type, buffer);
    this.#live.add(tensor);
    this.#allocatedBytes += tensor.byteLength;
    return tensor;
  }

  /** Writes bytes as they lie in memory (`stride` included), at a byte offset that is a multiple of 4. */
  write(tensor: Tensor, data: ArrayBufferView, byteOffset = 0): void {
    // Always as bytes: a Float16Array handed to writeBuffer kills the process.
    this.#device.gpu.queue.writeBuffer(tensor.buffer, byteOffset, bytesOf(data) as Uint8Array<ArrayBuffer>);
  }

  /** The memory itself comes back with the next submit: see `Device.reclaim`. */
  destroy(tensor: Tensor): void {
    if (!this.#live.delete(tensor)) return;
    this.#allocatedBytes -= tensor.byteLength;
    tensor.buffer.destroy();
  }

  destroyAll(): void {
    for (const tensor of this.#live) this.destroy(tensor);
  }
}
