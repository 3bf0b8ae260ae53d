import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf } from "../gpu/tensor.ts";
import {
  ACTIVATIONS,
  type Activation as Name,
  activation as kernel,
  gatedActivation as gatedKernel,
  WORKGROUP,
} from "../kernels/index.ts";
import { type ModuleSpec, temporary } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export type ActivationName = Name;

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

/** y = activation(gate) · up, with x: [rows, 2 · columns], per row all gates, then all ups. */
export function gatedActivation(spec: { name: Name; columns: number; output: string }): ModuleSpec<GatedActivation> {
  const { name, columns, output } = spec;
  return {
    weights: [],
    temporaries: [temporary(output, columns)],
    build: async ({ pipelines }) =>
      new GatedActivation(
        output,
        columns,
        await pipelines.compile(gatedKernel, {
          COLUMNS: columns,
          STRIDE: strideOf(2 * columns, "f32"),
          STRIDE_OUT: strideOf(columns, "f32"),
          ACTIVATION: ACTIVATIONS[name],
          WORKGROUP,
        }),
      ),
  };
}

export class GatedActivation {
  constructor(
    private readonly output: string,
    private readonly columns: number,
    private readonly pipeline: Pipeline<"x" | "y", never, { rows: number; columns: number }>,
  ) {}

  forward(pass: Pass, { tensor: x, rows }: Activations): Activations {
    const y = pass.temporaries.get(this.output);
    pass.commands.dispatch(this.pipeline, { x, y }, {}, { rows, columns: this.columns });
    return { tensor: y, rows };
  }
}
