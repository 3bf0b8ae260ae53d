import { ceilDiv } from "../base/bytes.ts";
import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { type Encoding, gemm, gemv, GEMV_OUTPUTS } from "../kernels/index.ts";
import { int8Pipelines, int8Temporaries, LlmInt8Linear } from "./linear-int8.ts";
import { GEMV_ROWS, type Linear, type LinearSpec } from "./linear-spec.ts";
import type { Matrix } from "./matrix.ts";
import { type BuildContext, matrixSpec, type ModuleSpec, temporary, vectorSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

/** y = x Wᵀ + b, with W [out, in] in its encoding and float32 sums, or as LLM.int8() has it. */
export function linear(spec: LinearSpec): ModuleSpec<Linear> {
  const weight = matrixSpec(spec.weight, spec.out, spec.in, {
    storedTransposed: spec.storedTransposed,
    quantizable: !spec.keepsBf16,
  });
  const bias = spec.bias === undefined ? undefined : vectorSpec(spec.bias, spec.out);
  return {
    weights: bias ? [weight, bias] : [weight],
    temporaries: [
      temporary(spec.output, spec.out, { rows: spec.outputRows }),
      ...(spec.int8Activations ? int8Temporaries(spec) : []),
    ],
    async build(context) {
      const matrix = context.weights.matrix(weight);
      const biasTensor = bias ? context.weights.vector(bias) : context.nothing;
      if (spec.int8Activations && matrix.encoding === "int8") {
        return new LlmInt8Linear(spec, matrix, biasTensor, await int8Pipelines(spec, context));
      }
      const pipelines = await pipelinesOf(spec, matrix.encoding, context);
      return new FloatLinear(spec.output, matrix, biasTensor, pipelines, context.nothing);
    },
  };
}

class FloatLinear implements Linear {
  constructor(
    private readonly output: string,
    private readonly weight: Matrix,
    private readonly bias: Tensor,
    private readonly pipelines: Awaited<ReturnType<typeof pipelinesOf>>,
    private readonly nothing: Tensor,
  ) {}

  forward(pass: Pass, x: Activations): Activations {
    const y = pass.temporaries.get(this.output);
    const { rows } = x;
    for (const { firstRow, rows: outputs, tensor, scales } of this.weight.parts) {
      const bindings = { weight: tensor, scales: scales ?? this.nothing, x: x.tensor, bias: this.bias, y };
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
