import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import source from "../../shaders/pack_bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { WORKGROUP } from "./elementwise.ts";

/** Workgroups along x, few enough for every device; y takes the rest. */
const LINE = 32768;

export const packBf16 = defineKernel({
  name: "pack_bf16",
  source: [bf16, source],
  bindings: { x: "read", y: "read_write" },
  constants: ["COLUMNS", "STRIDE", "WORKGROUP"],
  params: { count: "u32" },
  workgroups: ({ count }: { count: number }) => {
    const groups = ceilDiv(count, WORKGROUP * 2);
    return [Math.min(groups, LINE), ceilDiv(groups, LINE), 1];
  },
});
