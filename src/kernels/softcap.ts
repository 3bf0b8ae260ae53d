import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import cap from "../../shaders/lib/softcap.wgsl" with { type: "text" };
import source from "../../shaders/softcap.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const softcap = defineKernel({
  name: "softcap",
  source: [bf16, cap, source],
  bindings: { x: "read_write" },
  constants: ["STRIDE", "CAP", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
