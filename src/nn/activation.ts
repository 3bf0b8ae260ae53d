import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf } from "../gpu/tensor.ts";
import { ACTIVATIONS, type Activation as Name, activation as kernel, WORKGROUP } from "../kernels/index.ts";
import type { ModuleSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

/** x = activation(x), in place. */
export function activation(spec: { name: Name; columns: number }): ModuleSpec<Activation> {
  return {
    weights: [],
    temporaries: [],
    build: async ({ pipelines }) =>
      new Activation(
        await pipelines.compile(kernel, {
          STRIDE: strideOf(spec.columns, "f32"),
          ACTIVATION: ACTIVATIONS[spec.name],
          WORKGROUP,
        }),
      ),
  };
}

export class Activation {
  constructor(private readonly pipeline: Pipeline<"x", never, { rows: number; columns: number }>) {}

  forward(pass: Pass, x: Activations): Activations {
    pass.commands.dispatch(this.pipeline, { x: x.tensor }, {}, { rows: x.rows, columns: x.tensor.stride });
    return x;
  }
}
