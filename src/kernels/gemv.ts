import source from "../../shaders/gemv.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";

/** Outputs that one workgroup makes: 4 × 32 lanes, of which a device always takes 128. */
export const GEMV_OUTPUTS = 4;

export const gemv = forEachEncoding((encoding) =>
  defineKernel({
    name: `gemv_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, source],
    ...withWeight(encoding, {
      bindings: { x: "read", bias: "read", y: "read_write" },
      constants: ["OUTPUTS", "STRIDE_OUT", "OUT_AT", "HAS_BIAS", "ROUND", "BLOCKS"],
    }),
    params: { outputs: "u32", first_output: "u32" },
    workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [ceilDiv(outputs, GEMV_OUTPUTS), rows, 1],
  }),
);
