import source from "../../shaders/add.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const add = defineKernel({
  name: "add",
  source: [bf16, source],
  bindings: { x: "read", y: "read_write" },
  constants: ["STRIDE", "ROUND", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
