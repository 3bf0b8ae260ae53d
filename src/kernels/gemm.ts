import source from "../../shaders/gemm.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";

/** Rows and outputs of the tile that one workgroup makes. */
const TILE = 32;

export const gemm = forEachEncoding((encoding) =>
  defineKernel({
    name: `gemm_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, source],
    ...withWeight(encoding, {
      bindings: { x: "read", bias: "read", y: "read_write" },
      constants: ["STRIDE_OUT", "OUT_AT", "HAS_BIAS", "ROUND"],
    }),
    params: { rows: "u32", outputs: "u32", first_output: "u32" },
    workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [
      ceilDiv(outputs, TILE),
      ceilDiv(rows, TILE),
      1,
    ],
  }),
);
