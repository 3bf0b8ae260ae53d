import source from "../../shaders/transpose_bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { WORKGROUP } from "./elementwise.ts";

export const transposeBf16 = defineKernel({
  name: "transpose_bf16",
  source: [source],
  bindings: { x: "read", y: "read_write" },
  constants: ["IN_STRIDE", "OUT_STRIDE", "WORKGROUP"],
  params: { ins: "u32", first_in: "u32", first_out: "u32", outs: "u32" },
  workgroups: ({ ins, outs }: { ins: number; outs: number }) => [ceilDiv(outs, WORKGROUP), ceilDiv(ins, 2), 1],
});
