import source from "../../shaders/gemv_lanes.wgsl" with { type: "text" };
import blockSum from "../../shaders/lib/block_sum.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";
import { forEachSharing, LANES } from "./lanes.ts";

export const gemvLanes = forEachSharing((block) =>
  forEachEncoding((encoding) =>
    defineKernel({
      name: `gemv_lanes_${encoding}`,
      source: [block, bf16, ...WEIGHT_LIBRARIES[encoding].sources, blockSum, source],
      ...withWeight(encoding, {
        bindings: { x: "read", bias: "read", y: "read_write" },
        constants: ["STRIDE_OUT", "OUT_AT", "HAS_BIAS", "ROUND"],
      }),
      params: { outputs: "u32", first_output: "u32" },
      workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [ceilDiv(outputs, LANES), rows, 1],
    }),
  ),
);
