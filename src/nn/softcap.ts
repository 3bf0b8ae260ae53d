import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf } from "../gpu/tensor.ts";
import { softcap as kernel, WORKGROUP } from "../kernels/index.ts";
import type { ModuleSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

/** x = bf16(cap · tanh(x / cap)), in place: Gemma 2's logits. */
export function softcap(spec: { cap: number; columns: number }): ModuleSpec<Softcap> {
  return {
    weights: [],
    temporaries: [],
    build: async ({ pipelines }) =>
      new Softcap(await pipelines.compile(kernel, { STRIDE: strideOf(spec.columns, "f32"), CAP: spec.cap, WORKGROUP })),
  };
}

export class Softcap {
  constructor(private readonly pipeline: Pipeline<"x", never, { rows: number; columns: number }>) {}

  forward(pass: Pass, x: Activations): Activations {
    pass.commands.dispatch(this.pipeline, { x: x.tensor }, {}, { rows: x.rows, columns: x.tensor.stride });
    return x;
  }
}
