import { ceilDiv } from "../base/bytes.ts";
import type { Pipeline } from "../gpu/kernel.ts";
import { hasPackedDot } from "../gpu/language.ts";
import { strideOf, type Tensor } from "../gpu/tensor.ts";
import {
  gemmCodes,
  GEMV_OUTPUTS,
  gemvCodes,
  OUTLIER_COLUMNS,
  outlierColumns,
  quantizeRows,
  WORKGROUP,
} from "../kernels/index.ts";
import { GEMV_ROWS, type Linear, type LinearSpec } from "./linear-spec.ts";
import type { Matrix } from "./matrix.ts";
import { type BuildContext, temporary, type TemporarySpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

/** Shared by all layers of one input size: each fills them anew. */
const labelsOf = (columns: number) => ({
  codes: `int8_codes_${columns}`,
  outliers: `int8_outliers_${columns}`,
  rowScale: "int8_row_scale",
});

/** What LLM.int8() needs besides the output: x in codes, which columns have an outlier, the scale of each row. */
export function int8Temporaries({ in: columns }: LinearSpec): TemporarySpec[] {
  const labels = labelsOf(columns);
  const stride = strideOf(columns, "bf16");
  return [
    temporary(labels.codes, stride / 4, { type: "u32" }),
    temporary(labels.outliers, ceilDiv(stride, OUTLIER_COLUMNS), { rows: 1, type: "u32" }),
    temporary(labels.rowScale, 1, { type: "u32" }), // float32, without the padding that its rows would have
  ];
}

/**
 * y = x Wᵀ + b as LLM.int8() has it, to the bit (bitsandbytes 0.50, CPU, evaluation mode): x enters and y leaves in
 * bfloat16. A row's result depends on the other rows of the call, by the outlier columns that they share
 * (docs/decisions/0011-llm-int8.md).
 */
export class LlmInt8Linear implements Linear {
  constructor(
    private readonly spec: LinearSpec,
    private readonly weight: Matrix,
    private readonly bias: Tensor,
    private readonly pipelines: Awaited<ReturnType<typeof int8Pipelines>>,
  ) {}

  forward({ commands, temporaries }: Pass, { tensor: x, rows }: Activations): Activations {
    const { pipelines, bias } = this;
    const labels = labelsOf(this.spec.in);
    const codes = temporaries.get(labels.codes);
    const outliers = temporaries.get(labels.outliers);
    const row_scale = temporaries.get(labels.rowScale);
    const y = temporaries.get(this.spec.output);

    commands.dispatch(pipelines.outlierColumns, { x, outliers }, { rows }, x);
    commands.dispatch(pipelines.quantizeRows, { x, outliers, codes, row_scale }, {}, { rows });
    for (const { firstRow: first_output, rows: outputs, tensor: weight, scales } of this.weight.parts) {
      const bindings = { weight, codes, row_scale, x, outliers, bias, y, scales: scales! };
      const pipeline: Pipeline<
        keyof typeof bindings,
        "rows" | "outputs" | "first_output",
        { rows: number; outputs: number }
      > = rows <= GEMV_ROWS ? pipelines.gemv : pipelines.gemm;
      commands.dispatch(pipeline, bindings, { rows, outputs, first_output }, { rows, outputs });
    }
    return { tensor: y, rows };
  }
}

export async function int8Pipelines(spec: LinearSpec, { pipelines }: BuildContext) {
  const stride = strideOf(spec.in, "bf16");
  const constants = {
    WEIGHT_STRIDE: stride,
    STRIDE_OUT: strideOf(spec.outputColumns ?? spec.out, "f32"),
    OUT_AT: spec.outputAt ?? 0,
    HAS_BIAS: spec.bias === undefined ? 0 : 1,
  };
  const dot = (await hasPackedDot()) ? "packed" : "unpacked";
  return {
    outlierColumns: await pipelines.compile(outlierColumns, { STRIDE: stride }),
    quantizeRows: await pipelines.compile(quantizeRows, { STRIDE: stride, WORKGROUP }),
    gemv: await pipelines.compile(gemvCodes[dot], { ...constants, OUTPUTS: GEMV_OUTPUTS }),
    gemm: await pipelines.compile(gemmCodes[dot], constants),
  };
}
