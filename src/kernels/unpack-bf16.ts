import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import source from "../../shaders/unpack_bf16.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const unpackBf16 = defineKernel({
  name: "unpack_bf16",
  source: [bf16, source],
  bindings: { x: "read", y: "read_write" },
  constants: ["COLUMNS", "STRIDE", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
