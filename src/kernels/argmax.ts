import source from "../../shaders/argmax.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";

/** What the kernel answers for a row that holds a NaN. */
export const NOT_A_TOKEN = 0xffffffff;

export const argmax = defineKernel({
  name: "argmax",
  source: [source],
  bindings: { x: "read", token: "read_write" },
  constants: ["COLUMNS", "STRIDE", "WORKGROUP"],
  params: {},
  workgroups: ({ rows }: { rows: number }) => [rows, 1, 1],
});
