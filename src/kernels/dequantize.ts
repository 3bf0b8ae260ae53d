import source from "../../shaders/dequantize.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";

export const dequantize = forEachEncoding((encoding) =>
  defineKernel({
    name: `dequantize_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, source],
    ...withWeight(encoding, { bindings: { y: "read_write" }, constants: ["WORKGROUP"] }),
    params: { rows: "u32" },
    workgroups: overRows(8),
  }),
);
