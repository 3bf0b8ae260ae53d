import source from "../../shaders/kv_write.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

export const kvWrite = defineKernel({
  name: "kv_write",
  source: [bf16, source],
  bindings: { qkv: "read", slots: "read", keys: "read_write", values: "read_write" },
  constants: ["STRIDE", "KV_HEADS", "HEAD_DIM", "HEAD_STRIDE", "KEYS_AT", "VALUES_AT", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
