import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { layerNorm as kernel } from "../kernels/index.ts";
import { type ModuleSpec, temporary, vectorSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface LayerNormSpec {
  /** The checkpoint's name: `${name}.weight`, `${name}.bias`. */
  name: string;
  columns: number;
  eps: number;
  output: string;
}

/** y = (x - mean) / √(variance + eps) · weight + bias, over each row. */
export function layerNorm(spec: LayerNormSpec): ModuleSpec<LayerNorm> {
  const weight = vectorSpec(`${spec.name}.weight`, spec.columns);
  const bias = vectorSpec(`${spec.name}.bias`, spec.columns);
  return {
    weights: [weight, bias],
    temporaries: [temporary(spec.output, spec.columns)],
    build: async ({ device, pipelines, weights }) =>
      new LayerNorm(
        spec.output,
        weights.vector(weight),
        weights.vector(bias),
        await pipelines.compile(device.hasSubgroups ? kernel.subgroups : kernel.workgroup, {
          COLUMNS: spec.columns,
          STRIDE: strideOf(spec.columns, "f32"),
          EPS: spec.eps,
          WORKGROUP: 128,
        }),
      ),
  };
}

export class LayerNorm {
  constructor(
    private readonly output: string,
    private readonly weight: Tensor,
    private readonly bias: Tensor,
    private readonly pipeline: Pipeline<"x" | "weight" | "bias" | "y", never, { rows: number }>,
  ) {}

  forward(pass: Pass, x: Activations): Activations {
    const y = pass.temporaries.get(this.output);
    pass.commands.dispatch(this.pipeline, { x: x.tensor, weight: this.weight, bias: this.bias, y }, {}, x);
    return { tensor: y, rows: x.rows };
  }
}
