import source from "../../shaders/gemm_lanes.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";
import { forEachSharing, LANES } from "./lanes.ts";

/** Rows that one workgroup makes. */
export const GEMM_LANES_ROWS = 4;
/** Outputs that each of its lanes makes. */
const OUTPUTS = 2;

export const gemmLanes = forEachSharing((block) =>
  forEachEncoding((encoding) =>
    defineKernel({
      name: `gemm_lanes_${encoding}`,
      source: [block, bf16, ...WEIGHT_LIBRARIES[encoding].sources, source],
      ...withWeight(encoding, {
        bindings: { x: "read", bias: "read", y: "read_write" },
        constants: ["STRIDE_OUT", "OUT_AT", "HAS_BIAS", "ROUND"],
      }),
      params: { rows: "u32", outputs: "u32", first_output: "u32" },
      workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [
        ceilDiv(outputs, OUTPUTS * LANES),
        ceilDiv(rows, GEMM_LANES_ROWS),
        1,
      ],
    }),
  ),
);
