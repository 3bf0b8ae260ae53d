import source from "../../shaders/rope.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const rope = defineKernel({
  name: "rope",
  source: [source],
  bindings: { tokens: "read", angles: "read", x: "read_write" },
  constants: ["HEADS", "HEAD_STRIDE", "FIRST", "PAIRS", "INTERLEAVED", "STRIDE", "ANGLE_STRIDE", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
