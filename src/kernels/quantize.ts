import absmaxSource from "../../shaders/absmax.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import int8Source from "../../shaders/quantize_int8.wgsl" with { type: "text" };
import nf4Source from "../../shaders/quantize_nf4.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { overRows, WORKGROUP } from "./elementwise.ts";

/** Workgroups along x, few enough for every device; y takes the rest. */
const LINE = 32768;

export const absmax = defineKernel({
  name: "absmax",
  source: [absmaxSource],
  bindings: { x: "read", absmax: "read_write" },
  constants: ["COLUMNS", "X_STRIDE", "BLOCK", "WORKGROUP"],
  params: { values: "u32" },
  workgroups: ({ blocks }: { blocks: number }) => {
    const groups = ceilDiv(blocks, WORKGROUP);
    return [Math.min(groups, LINE), ceilDiv(groups, LINE), 1];
  },
});

export const quantizeNf4 = defineKernel({
  name: "quantize_nf4",
  source: [nf4Source],
  bindings: { x: "read", absmax: "read", codes: "read_write" },
  constants: ["COLUMNS", "X_STRIDE", "WORKGROUP"],
  params: { rows: "u32" },
  workgroups: overRows(8),
});

export const quantizeInt8 = defineKernel({
  name: "quantize_int8",
  source: [bf16, int8Source],
  bindings: { x: "read", scale: "read", codes: "read_write" },
  constants: ["X_STRIDE", "WORKGROUP"],
  params: { rows: "u32" },
  workgroups: overRows(8),
});
