import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import source from "../../shaders/embed_tokens.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const embedTokens = defineKernel({
  name: "embed_tokens",
  source: [bf16, source],
  bindings: { tokens: "read", token_table: "read", y: "read_write" },
  constants: ["STRIDE", "SCALE", "WORKGROUP"],
  params: { first_id: "u32", ids: "u32" },
  workgroups: overRows(2),
});
