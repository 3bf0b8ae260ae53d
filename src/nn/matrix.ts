import type { Tensor } from "../gpu/tensor.ts";
import type { Encoding } from "../kernels/index.ts";

export type { Encoding } from "../kernels/index.ts";

/** A weight matrix [rows, columns]. One that exceeds what a kernel can bind lies in several tensors, split by rows. */
export interface Matrix {
  readonly rows: number;
  readonly columns: number;
  readonly encoding: Encoding;
  readonly parts: readonly MatrixPart[];
}

export interface MatrixPart {
  readonly firstRow: number;
  /** Rows of the matrix in this part. */
  readonly rows: number;
  /** The values, or the codes of an encoding. */
  readonly tensor: Tensor;
  /** What an encoding has besides: absmax of each block (NF4), SCB of each row (INT8). */
  readonly scales?: Tensor;
}

/**
 * The matrices of a layer's experts, all of one shape, in one tensor after another: whole experts, or, where one exceeds
 * what a kernel can bind, some rows of one.
 */
export interface ExpertStack {
  readonly encoding: Encoding;
  readonly parts: readonly ExpertPart[];
}

export interface ExpertPart {
  readonly firstExpert: number;
  readonly experts: number;
  /** Rows of each expert in this part, and the first of them. */
  readonly firstRow: number;
  readonly rows: number;
  readonly tensor: Tensor;
  readonly scales?: Tensor;
}
