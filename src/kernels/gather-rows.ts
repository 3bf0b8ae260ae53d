import source from "../../shaders/gather_rows.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const gatherRows = defineKernel({
  name: "gather_rows",
  source: [source],
  bindings: { x: "read", index: "read", y: "read_write" },
  constants: ["STRIDE", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
