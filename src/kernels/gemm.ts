import source from "../../shaders/gemm.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import weightBf16 from "../../shaders/lib/weight_bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";

/** Rows and outputs of the tile that one workgroup makes. */
const TILE = 32;

const variant = (encoding: string, weight: string) =>
  defineKernel({
    name: `gemm_${encoding}`,
    source: [bf16, weight, source],
    bindings: { weight: "read", x: "read", bias: "read", y: "read_write" },
    constants: ["WEIGHT_STRIDE", "STRIDE_OUT", "HAS_BIAS", "ROUND"],
    params: { rows: "u32", outputs: "u32", first_output: "u32" },
    workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [
      ceilDiv(outputs, TILE),
      ceilDiv(rows, TILE),
      1,
    ],
  });

export const gemm = { bf16: variant("bf16", weightBf16) };
