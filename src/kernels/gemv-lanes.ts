import source from "../../shaders/gemv_lanes.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";

/** Outputs and rows that one workgroup makes. */
const LANES = 32;
const ROWS = 2;

export const gemvLanes = forEachEncoding((encoding) =>
  defineKernel({
    name: `gemv_lanes_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, source],
    ...withWeight(encoding, {
      bindings: { x: "read", bias: "read", y: "read_write" },
      constants: ["STRIDE_OUT", "OUT_AT", "HAS_BIAS", "ROUND"],
    }),
    params: { rows: "u32", outputs: "u32", first_output: "u32" },
    workgroups: ({ rows, outputs }: { rows: number; outputs: number }) => [
      ceilDiv(outputs, LANES),
      ceilDiv(rows, ROWS),
      1,
    ],
  }),
);
