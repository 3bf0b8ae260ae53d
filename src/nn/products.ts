import { ceilDiv } from "../base/bytes.ts";
import type { Device } from "../gpu/device.ts";
import type { Pipeline, PipelineCache } from "../gpu/kernel.ts";
import {
  type Encoding,
  gemm,
  GEMM_LANES_ROWS,
  gemmLanes,
  gemv,
  GEMV_OUTPUTS,
  gemvLanes,
  sharingFor,
} from "../kernels/index.ts";
import { GEMV_ROWS } from "./linear-spec.ts";

/** On a device that is a CPU three rows cost less with `gemm_lanes`, which takes four at a time, than one by one. */
const LANES_ROWS = 2;

/** Rows that a device takes together: each group of so many costs the same, however full it is. A GPU has room for all. */
export const rowStepOf = ({ info }: Device): number => (info.isSoftware ? GEMM_LANES_ROWS : 1);

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
  const sharing = sharingFor(device.info.subgroupMinSize);
  if (device.info.isSoftware) {
    const few: Product = await pipelines.compile(gemvLanes[sharing][encoding], shape);
    return { few, fewRows: LANES_ROWS, many: await pipelines.compile(gemmLanes[sharing][encoding], shape) };
  }
  const many: Product = await pipelines.compile(gemm[encoding], shape);
  const blocks = ceilDiv(shape.WEIGHT_STRIDE, 32);
  // gemv keeps a sum for each block: a row of more than 32,768 columns is too long for the memory that every device has.
  if (GEMV_OUTPUTS * blocks * 4 > device.limits.maxComputeWorkgroupStorageSize) {
    return { few: await pipelines.compile(gemvLanes[sharing][encoding], shape), fewRows: GEMV_ROWS, many };
  }
  const constants = { ...shape, OUTPUTS: GEMV_OUTPUTS, BLOCKS: blocks };
  return { few: await pipelines.compile(gemv[encoding], constants), fewRows: GEMV_ROWS, many };
}
