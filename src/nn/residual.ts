import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf } from "../gpu/tensor.ts";
import { add, WORKGROUP } from "../kernels/index.ts";
import type { ModuleSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

/** stream += x, in place. `round`: to bfloat16, as the stream is at every layer boundary. */
export function residual(spec: { columns: number; round: boolean }): ModuleSpec<Residual> {
  return {
    weights: [],
    temporaries: [],
    build: async ({ pipelines }) =>
      new Residual(
        await pipelines.compile(add, { STRIDE: strideOf(spec.columns, "f32"), ROUND: spec.round ? 1 : 0, WORKGROUP }),
      ),
  };
}

export class Residual {
  constructor(private readonly pipeline: Pipeline<"x" | "y", never, { rows: number; columns: number }>) {}

  forward(pass: Pass, stream: Activations, x: Activations): Activations {
    const dims = { rows: stream.rows, columns: stream.tensor.stride };
    pass.commands.dispatch(this.pipeline, { x: x.tensor, y: stream.tensor }, {}, dims);
    return stream;
  }
}
