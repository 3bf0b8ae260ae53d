import source from "../../shaders/activation.wgsl" with { type: "text" };
import gatedSource from "../../shaders/gated_activation.wgsl" with { type: "text" };
import functions from "../../shaders/lib/activation.wgsl" with { type: "text" };
import sigmoid from "../../shaders/lib/sigmoid.wgsl" with { type: "text" };
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";

/** The values of `ACTIVATION` in the shader. */
export const ACTIVATIONS = { gelu_tanh: 0, gelu_erf: 1, quick_gelu: 2, silu: 3, relu: 4 } as const;
export type Activation = keyof typeof ACTIVATIONS;

export const activation = defineKernel({
  name: "activation",
  source: [sigmoid, functions, source],
  bindings: { x: "read_write" },
  constants: ["STRIDE", "ACTIVATION", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});

export const gatedActivation = defineKernel({
  name: "gated_activation",
  source: [sigmoid, functions, gatedSource],
  bindings: { x: "read", y: "read_write" },
  constants: ["COLUMNS", "STRIDE", "STRIDE_OUT", "ACTIVATION", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
