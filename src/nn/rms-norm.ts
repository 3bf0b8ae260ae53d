import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { headNorm as headKernel, rmsNorm as kernel } from "../kernels/index.ts";
import type { HeadColumns } from "./heads.ts";
import { type ModuleSpec, temporary, vectorSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

/** What an RMS norm is but for its place: the same for all those of a model. */
export interface RmsNormForm {
  eps: number;
  /** What is added to the weight: 1 where checkpoints keep weight - 1 (Gemma), else 0. */
  offset: 0 | 1;
}

export interface RmsNormSpec extends RmsNormForm {
  /** The checkpoint's name: `${name}.weight`. */
  name: string;
  columns: number;
  output: string;
}

/** y = x / √(mean of x² + eps) · (weight + offset), over each row. */
export function rmsNorm(spec: RmsNormSpec): ModuleSpec<RmsNorm> {
  const weight = vectorSpec(`${spec.name}.weight`, spec.columns);
  return {
    weights: [weight],
    temporaries: [temporary(spec.output, spec.columns)],
    build: async ({ device, pipelines, weights }) =>
      new RmsNorm(
        spec.output,
        weights.vector(weight),
        await pipelines.compile(device.hasSubgroups ? kernel.subgroups : kernel.workgroup, {
          COLUMNS: spec.columns,
          STRIDE: strideOf(spec.columns, "f32"),
          EPS: spec.eps,
          OFFSET: spec.offset,
          WORKGROUP: 128,
        }),
      ),
  };
}

export class RmsNorm {
  constructor(
    private readonly output: string,
    private readonly weight: Tensor,
    private readonly pipeline: Pipeline<"x" | "weight" | "y", never, { rows: number }>,
  ) {}

  forward(pass: Pass, x: Activations): Activations {
    const y = pass.temporaries.get(this.output);
    pass.commands.dispatch(this.pipeline, { x: x.tensor, weight: this.weight, y }, {}, x);
    return { tensor: y, rows: x.rows };
  }
}

export interface HeadNormSpec extends RmsNormForm {
  /** The checkpoint's name: `${name}.weight`, [headDim], the same for all heads. */
  name: string;
  headDim: number;
  /** Columns of a row of x. */
  columns: number;
  place: HeadColumns;
}

/** The same over each of some heads of every row, in place. */
export function headNorm(spec: HeadNormSpec): ModuleSpec<HeadNorm> {
  const weight = vectorSpec(`${spec.name}.weight`, spec.headDim);
  return {
    weights: [weight],
    temporaries: [],
    build: async ({ device, pipelines, weights }) =>
      new HeadNorm(
        spec.place.heads,
        weights.vector(weight),
        await pipelines.compile(device.hasSubgroups ? headKernel.subgroups : headKernel.workgroup, {
          HEAD_DIM: spec.headDim,
          HEAD_STRIDE: spec.place.headStride,
          FIRST: spec.place.first,
          STRIDE: strideOf(spec.columns, "f32"),
          EPS: spec.eps,
          OFFSET: spec.offset,
          WORKGROUP: 64,
        }),
      ),
  };
}

export class HeadNorm {
  constructor(
    private readonly heads: number,
    private readonly weight: Tensor,
    private readonly pipeline: Pipeline<"weight" | "x", never, { rows: number; heads: number }>,
  ) {}

  forward(pass: Pass, x: Activations): Activations {
    const dims = { rows: x.rows, heads: this.heads };
    pass.commands.dispatch(this.pipeline, { weight: this.weight, x: x.tensor }, {}, dims);
    return x;
  }
}
