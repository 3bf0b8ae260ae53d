import gemmSource from "../../shaders/gemm_codes.wgsl" with { type: "text" };
import gemvSource from "../../shaders/gemv_codes.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import dotPacked from "../../shaders/lib/dot_packed.wgsl" with { type: "text" };
import dotUnpacked from "../../shaders/lib/dot_unpacked.wgsl" with { type: "text" };
import llmInt8 from "../../shaders/lib/llm_int8.wgsl" with { type: "text" };
import outliers from "../../shaders/lib/outliers.wgsl" with { type: "text" };
import weightInt8 from "../../shaders/lib/weight_int8.wgsl" with { type: "text" };
import outlierColumnsSource from "../../shaders/outlier_columns.wgsl" with { type: "text" };
import quantizeRowsSource from "../../shaders/quantize_rows.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { gemm } from "./gemm.ts";
import { gemv } from "./gemv.ts";

// LLM.int8() (bitsandbytes 0.50, `MatMul8bitLt` in evaluation mode) in three steps: which columns of x have an outlier in
// this call, the codes of every row of x, and the product.

/** Columns that one word of `outliers` stands for. */
export const OUTLIER_COLUMNS = 32;

export const outlierColumns = defineKernel({
  name: "outlier_columns",
  source: [bf16, outliers, outlierColumnsSource],
  bindings: { x: "read", outliers: "read_write" },
  constants: ["STRIDE"],
  params: { rows: "u32" },
  workgroups: ({ stride }: { stride: number }) => [ceilDiv(stride, OUTLIER_COLUMNS), 1, 1],
});

export const quantizeRows = defineKernel({
  name: "quantize_rows",
  source: [bf16, outliers, quantizeRowsSource],
  bindings: { x: "read", outliers: "read", codes: "read_write", row_scale: "read_write" },
  constants: ["STRIDE", "WORKGROUP"],
  params: {},
  workgroups: ({ rows }: { rows: number }) => [rows, 1, 1],
});

const operands = {
  bindings: {
    weight: "read",
    codes: "read",
    row_scale: "read",
    x: "read",
    outliers: "read",
    bias: "read",
    y: "read_write",
    scales: "read",
  },
  params: { rows: "u32", outputs: "u32", first_output: "u32" },
} as const;

const gemvCodesBy = (dot: string) =>
  defineKernel({
    name: "gemv_codes",
    source: [dot, bf16, weightInt8, llmInt8, gemvSource],
    ...operands,
    constants: ["WEIGHT_STRIDE", "STRIDE_OUT", "OUT_AT", "HAS_BIAS", "OUTPUTS"],
    workgroups: gemv.int8.workgroups,
  });

const gemmCodesBy = (dot: string) =>
  defineKernel({
    name: "gemm_codes",
    source: [dot, bf16, weightInt8, llmInt8, gemmSource],
    ...operands,
    constants: ["WEIGHT_STRIDE", "STRIDE_OUT", "OUT_AT", "HAS_BIAS"],
    workgroups: gemm.int8.workgroups,
  });

/** `packed`: where WGSL has `packed_4x8_integer_dot_product`. */
export const gemvCodes = { packed: gemvCodesBy(dotPacked), unpacked: gemvCodesBy(dotUnpacked) };
export const gemmCodes = { packed: gemmCodesBy(dotPacked), unpacked: gemmCodesBy(dotUnpacked) };
