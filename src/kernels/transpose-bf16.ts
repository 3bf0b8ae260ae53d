import source from "../../shaders/transpose_bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { WORKGROUP } from "./elementwise.ts";

/** Rows of the file that one invocation turns: a piece begins at a multiple of them. */
export const TRANSPOSE_ROWS = 8;

export const transposeBf16 = defineKernel({
  name: "transpose_bf16",
  source: [source],
  bindings: { x: "read", y: "read_write" },
  constants: ["IN_STRIDE", "OUT_STRIDE", "WORKGROUP"],
  params: { ins: "u32", first_in: "u32", first_out: "u32", outs: "u32" },
  // A part that begins in the middle of a word has a word more.
  workgroups: ({ ins, outs }: { ins: number; outs: number }) => [
    ceilDiv(Math.floor(outs / 2) + 1, WORKGROUP),
    ceilDiv(ins, TRANSPOSE_ROWS),
    1,
  ],
});
