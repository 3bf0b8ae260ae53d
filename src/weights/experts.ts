import { ceilDiv } from "../base/bytes.ts";
import { strideOf } from "../gpu/tensor.ts";
import type { Encoding, ExpertPart, WeightSpec } from "../nn/index.ts";
import { codeWords, splitRows } from "./quantize.ts";

/** Rows in parts of at most `maxBytes`, each a multiple of `step` rows but for the last. */
export function rowParts(
  rows: number,
  rowBytes: number,
  step: number,
  maxBytes: number,
): { firstRow: number; count: number }[] {
  const most = Math.max(1, Math.floor(maxBytes / (rowBytes * step))) * step;
  return Array.from({ length: ceilDiv(rows, most) }, (_, part) => ({
    firstRow: part * most,
    count: Math.min(most, rows - part * most),
  }));
}

type StackPart = Omit<ExpertPart, "tensor" | "scales">;

/**
 * How the experts of a stack are shared out among tensors that a kernel can bind: as many whole experts as go into one;
 * where one alone, in bfloat16 as it is loaded, does not, parts of a single expert, split as any matrix is.
 */
export function stackParts(spec: WeightSpec, encoding: Encoding, maxBytes: number): StackPart[] {
  const { rows, columns, stack } = spec;
  const experts = stack!.experts;
  const bf16Bytes = strideOf(columns, "bf16") * 2;
  if (rows * bf16Bytes > maxBytes) {
    const parts = rowParts(rows, bf16Bytes, splitRows(columns, encoding), maxBytes);
    return Array.from({ length: experts }, (_, firstExpert) =>
      parts.map(({ firstRow, count }) => ({ firstExpert, experts: 1, firstRow, rows: count })),
    ).flat();
  }
  const rowBytes = encoding === "bf16" ? bf16Bytes : codeWords(columns, encoding) * 4;
  return rowParts(experts, rows * rowBytes, 1, maxBytes).map(({ firstRow, count }) => ({
    firstExpert: firstRow,
    experts: count,
    firstRow: 0,
    rows,
  }));
}

/** Where in a part row `row` of this expert lies (default: the first that it has there), or undefined. */
export function placeIn(part: StackPart, { stack }: WeightSpec, row = part.firstRow): number | undefined {
  const expert = stack!.expert - part.firstExpert;
  if (expert < 0 || expert >= part.experts || row < part.firstRow || row >= part.firstRow + part.rows) return undefined;
  return expert * part.rows + (row - part.firstRow);
}
