import source from "../../shaders/gemv.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import weightBf16 from "../../shaders/lib/weight_bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";

/** Outputs that one workgroup makes: 4 × 32 lanes, of which a device always takes 128. */
export const GEMV_OUTPUTS = 4;

const variant = (encoding: string, weight: string) =>
  defineKernel({
    name: `gemv_${encoding}`,
    source: [bf16, weight, source],
    bindings: { weight: "read", x: "read", bias: "read", y: "read_write" },
    constants: ["WEIGHT_STRIDE", "OUTPUTS", "STRIDE_OUT", "HAS_BIAS", "ROUND", "BLOCKS"],
    params: { outputs: "u32", first_output: "u32" },
    workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [ceilDiv(outputs, GEMV_OUTPUTS), rows, 1],
  });

export const gemv = { bf16: variant("bf16", weightBf16) };
