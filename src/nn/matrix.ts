import type { Tensor } from "../gpu/tensor.ts";

/** A weight matrix [rows, columns]. One that exceeds what a kernel can bind lies in several tensors, split by rows. */
export interface Matrix {
  readonly rows: number;
  readonly columns: number;
  readonly parts: readonly MatrixPart[];
}

export interface MatrixPart {
  readonly firstRow: number;
  readonly tensor: Tensor;
}
