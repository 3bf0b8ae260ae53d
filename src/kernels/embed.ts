import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import source from "../../shaders/embed.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const embed = defineKernel({
  name: "embed",
  source: [bf16, source],
  bindings: { tokens: "read", token_table: "read", position_table: "read", y: "read_write" },
  constants: ["STRIDE", "WORKGROUP"],
  params: { first_id: "u32", ids: "u32", first_position: "u32", positions: "u32" },
  workgroups: overRows(2),
});
