import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { int8Pipelines, int8Temporaries, LlmInt8Linear } from "./linear-int8.ts";
import type { Linear, LinearSpec } from "./linear-spec.ts";
import type { Matrix } from "./matrix.ts";
import { matrixSpec, type ModuleSpec, temporary, vectorSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";
import { compileProducts, type Products, type ProductShape } from "./products.ts";

/** y = x Wᵀ + b, with W [out, in] in its encoding and float32 sums, or as LLM.int8() has it. */
export function linear(spec: LinearSpec): ModuleSpec<Linear> {
  const weight = matrixSpec(spec.weight, spec.out, spec.in, {
    storedTransposed: spec.storedTransposed,
    quantizable: spec.keepsBf16 !== true,
    isQuantizedAtLoad: !spec.keepsBf16,
  });
  const bias = spec.bias === undefined ? undefined : vectorSpec(spec.bias, spec.out);
  return {
    weights: bias ? [weight, bias] : [weight],
    temporaries: [
      temporary(spec.output, spec.outputColumns ?? spec.out, { rows: spec.outputRows }),
      ...(spec.int8Activations ? int8Temporaries(spec) : []),
    ],
    async build(context) {
      const matrix = context.weights.matrix(weight);
      const biasTensor = bias ? context.weights.vector(bias) : context.nothing;
      if (spec.int8Activations && matrix.encoding === "int8") {
        return new LlmInt8Linear(spec, matrix, biasTensor, await int8Pipelines(spec, context));
      }
      const products = await compileProducts(matrix.encoding, shapeOf(spec), context);
      return new FloatLinear(spec.output, matrix, biasTensor, products, context.nothing);
    },
  };
}

class FloatLinear implements Linear {
  constructor(
    private readonly output: string,
    private readonly weight: Matrix,
    private readonly bias: Tensor,
    private readonly products: Products,
    private readonly nothing: Tensor,
  ) {}

  forward(pass: Pass, x: Activations): Activations {
    const y = pass.temporaries.get(this.output);
    const { rows } = x;
    for (const { firstRow, rows: outputs, tensor, scales } of this.weight.parts) {
      const bindings = { weight: tensor, scales: scales ?? this.nothing, x: x.tensor, bias: this.bias, y };
      const params = { rows, outputs, first_output: firstRow };
      const product = rows <= this.products.fewRows ? this.products.few : this.products.many;
      pass.commands.dispatch(product, bindings, params, { rows, outputs });
    }
    return { tensor: y, rows };
  }
}

const shapeOf = (spec: LinearSpec): ProductShape => ({
  WEIGHT_STRIDE: strideOf(spec.in, "bf16"),
  COLUMNS: spec.in,
  STRIDE_OUT: strideOf(spec.outputColumns ?? spec.out, "f32"),
  OUT_AT: spec.outputAt ?? 0,
  HAS_BIAS: spec.bias === undefined ? 0 : 1,
  ROUND: spec.round ? 1 : 0,
});
