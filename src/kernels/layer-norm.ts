import source from "../../shaders/layer_norm.wgsl" with { type: "text" };
import bySubgroups from "../../shaders/lib/reduce_subgroups.wgsl" with { type: "text" };
import byWorkgroup from "../../shaders/lib/reduce_workgroup.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";

const variant = (reduce: string) =>
  defineKernel({
    name: "layer_norm",
    source: [reduce, source],
    bindings: { x: "read", weight: "read", bias: "read", y: "read_write" },
    constants: ["COLUMNS", "STRIDE", "EPS", "WORKGROUP"],
    params: {},
    workgroups: ({ rows }: { rows: number }) => [rows, 1, 1],
  });

export const layerNorm = { subgroups: variant(bySubgroups), workgroup: variant(byWorkgroup) };
