import { ceilDiv } from "../base/bytes.ts";
import type { Device } from "../gpu/device.ts";
import type { Pipeline, PipelineCache } from "../gpu/kernel.ts";
import { type Encoding, gemm, gemv, GEMV_OUTPUTS, gemvLanes } from "../kernels/index.ts";
import { GEMV_ROWS } from "./linear-spec.ts";

/** Up to so many rows a device that is a CPU is faster with `gemv_lanes` than with the tiles of `gemm`. */
const LANES_ROWS = 48;

type Product = Pipeline<
  "weight" | "scales" | "x" | "bias" | "y",
  "rows" | "outputs" | "first_output",
  { rows: number; outputs: number }
>;

/** The kernels of y = x Wᵀ + b on one device. Both give the same bits, so which one runs is a matter of speed alone. */
export interface Products {
  /** For up to `fewRows` rows of x. */
  readonly few: Product;
  readonly fewRows: number;
  readonly many: Product;
}

export interface ProductShape {
  readonly WEIGHT_STRIDE: number;
  readonly COLUMNS: number;
  readonly STRIDE_OUT: number;
  readonly OUT_AT: number;
  readonly HAS_BIAS: number;
  readonly ROUND: number;
}

export async function compileProducts(
  encoding: Encoding,
  shape: ProductShape,
  { device, pipelines }: { device: Device; pipelines: PipelineCache },
): Promise<Products> {
  const many: Product = await pipelines.compile(gemm[encoding], shape);
  if (device.info.isSoftware) {
    return { few: await pipelines.compile(gemvLanes[encoding], shape), fewRows: LANES_ROWS, many };
  }
  const constants = { ...shape, OUTPUTS: GEMV_OUTPUTS, BLOCKS: ceilDiv(shape.WEIGHT_STRIDE, 32) };
  return { few: await pipelines.compile(gemv[encoding], constants), fewRows: GEMV_ROWS, many };
}
