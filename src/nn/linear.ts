import { ceilDiv } from "../base/bytes.ts";
import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { type Encoding, gemm, gemv, GEMV_OUTPUTS } from "../kernels/index.ts";
import type { Matrix } from "./matrix.ts";
import { type BuildContext, matrixSpec, type ModuleSpec, temporary, vectorSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface LinearSpec {
  /** Names of the weight, in order of preference. */
  weight: readonly string[];
  bias?: string;
  in: number;
  out: number;
  /** The file keeps the weight as [in, out]. */
  storedTransposed?: boolean;
  /** The temporary that takes the output, and its rows if they are not the pass's tokens. */
  output: string;
  outputRows?: number;
  /** Rounds the output to bfloat16. */
  round?: boolean;
  /** Leaves the weight in bfloat16 whatever the encoding of the others: a head's. */
  keepsBf16?: boolean;
}

/** y = x Wᵀ + b, with W [out, in] in its encoding and float32 sums. */
export function linear(spec: LinearSpec): ModuleSpec<Linear> {
  const weight = matrixSpec(spec.weight, spec.out, spec.in, {
    storedTransposed: spec.storedTransposed,
    quantizable: !spec.keepsBf16,
  });
  const bias = spec.bias === undefined ? undefined : vectorSpec(spec.bias, spec.out);
  return {
    weights: bias ? [weight, bias] : [weight],
    temporaries: [temporary(spec.output, spec.out, { rows: spec.outputRows })],
    async build(context) {
      const matrix = context.weights.matrix(weight);
      const pipelines = await pipelinesOf(spec, matrix.encoding, context);
      return new Linear(spec.output, matrix, bias && context.weights.vector(bias), pipelines, context.nothing);
    },
  };
}

/**
 * Up to this many rows each row reads the weights anew; above, 32 rows share a tile. Both give the same bits, so this
 * is a matter of speed alone.
 */
const GEMV_ROWS = 8;

export class Linear {
  constructor(
    private readonly output: string,
    private readonly weight: Matrix,
    private readonly bias: Tensor | undefined,
    private readonly pipelines: Awaited<ReturnType<typeof pipelinesOf>>,
    private readonly nothing: Tensor,
  ) {}

  forward(pass: Pass, x: Activations): Activations {
    const y = pass.temporaries.get(this.output);
    const { rows } = x;
    for (const { firstRow, rows: outputs, tensor, scales } of this.weight.parts) {
      const { nothing, bias = nothing } = this;
      const bindings = { weight: tensor, scales: scales ?? nothing, x: x.tensor, bias, y };
      const params = { rows, outputs, first_output: firstRow };
      const pipeline: Pipeline<keyof typeof bindings, keyof typeof params, { rows: number; outputs: number }> =
        rows <= GEMV_ROWS ? this.pipelines.gemv : this.pipelines.gemm;
      pass.commands.dispatch(pipeline, bindings, params, { rows, outputs });
    }
    return { tensor: y, rows };
  }
}

async function pipelinesOf(spec: LinearSpec, encoding: Encoding, { pipelines }: BuildContext) {
  const constants = {
    WEIGHT_STRIDE: strideOf(spec.in, "bf16"),
    COLUMNS: spec.in,
    STRIDE_OUT: strideOf(spec.out, "f32"),
    HAS_BIAS: spec.bias === undefined ? 0 : 1,
    ROUND: spec.round ? 1 : 0,
  };
  const blocks = ceilDiv(constants.WEIGHT_STRIDE, 32);
  return {
    gemv: await pipelines.compile(gemv[encoding], { ...constants, OUTPUTS: GEMV_OUTPUTS, BLOCKS: blocks }),
    gemm: await pipelines.compile(gemm[encoding], constants),
  };
}
