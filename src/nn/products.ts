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
  const blocks = ceilDiv(shape.WEIGHT_STRIDE, 32);
  // gemv keeps a sum for each block: a row of more than 32,768 columns is too long for the memory that every device has.
  const hasRoom = GEMV_OUTPUTS * blocks * 4 <= device.limits.maxComputeWorkgroupStorageSize;
  if (device.info.isSoftware || !hasRoom) {
    const few = await pipelines.compile(gemvLanes[encoding], shape);
    return { few, fewRows: hasRoom ? LANES_ROWS : GEMV_ROWS, many };
  }
  const constants = { ...shape, OUTPUTS: GEMV_OUTPUTS, BLOCKS: blocks };
  return { few: await pipelines.compile(gemv[encoding], constants), fewRows: GEMV_ROWS, many };
}
