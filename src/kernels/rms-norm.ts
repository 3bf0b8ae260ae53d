import headSource from "../../shaders/head_norm.wgsl" with { type: "text" };
import bySubgroups from "../../shaders/lib/reduce_subgroups.wgsl" with { type: "text" };
import byWorkgroup from "../../shaders/lib/reduce_workgroup.wgsl" with { type: "text" };
import source from "../../shaders/rms_norm.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";

const rows = (reduce: string) =>
  defineKernel({
    name: "rms_norm",
    source: [reduce, source],
    bindings: { x: "read", weight: "read", y: "read_write" },
    constants: ["COLUMNS", "STRIDE", "EPS", "OFFSET", "WORKGROUP"],
    params: {},
    workgroups: ({ rows }: { rows: number }) => [rows, 1, 1],
  });

const heads = (reduce: string) =>
  defineKernel({
    name: "head_norm",
    source: [reduce, headSource],
    bindings: { weight: "read", x: "read_write" },
    constants: ["HEAD_DIM", "HEAD_STRIDE", "FIRST", "STRIDE", "EPS", "OFFSET", "WORKGROUP"],
    params: {},
    workgroups: ({ rows, heads }: { rows: number; heads: number }) => [rows, heads, 1],
  });

export const rmsNorm = { subgroups: rows(bySubgroups), workgroup: rows(byWorkgroup) };
export const headNorm = { subgroups: heads(bySubgroups), workgroup: heads(byWorkgroup) };
