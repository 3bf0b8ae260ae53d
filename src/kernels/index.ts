export { ACTIVATIONS, activation, type Activation, gatedActivation } from "./activation.ts";
export { add } from "./add.ts";
export { argmax, NOT_A_TOKEN } from "./argmax.ts";
export {
  attentionDecode,
  attentionLanes,
  attentionMerge,
  attentionPrefill,
  PAGE_TOKENS,
  chunksOf,
  partialSize,
  prefillShape,
  QUERIES_WORDS,
} from "./attention.ts";
export { WORKGROUP } from "./elementwise.ts";
export { dequantize } from "./dequantize.ts";
export { embedTokens } from "./embed-tokens.ts";
export { embed } from "./embed.ts";
export type { Encoding } from "./encoding.ts";
export {
  addGated,
  combineExperts,
  EXPERT_TILE,
  expertGemm,
  expertGemv,
  expertLanes,
  groupPairs,
  route,
  TILE_WORDS,
  tilesOf,
} from "./experts.ts";
export { gatherRows } from "./gather-rows.ts";
export { gemm } from "./gemm.ts";
export { GEMM_LANES_ROWS, gemmLanes } from "./gemm-lanes.ts";
export { gemv, GEMV_OUTPUTS } from "./gemv.ts";
export { gemvLanes } from "./gemv-lanes.ts";
export { sharingFor, type Sharing, SUBGROUP_LANES } from "./lanes.ts";
export { kvWrite } from "./kv-write.ts";
export { layerNorm } from "./layer-norm.ts";
export { absorbQuery, expandValue, latentWrite } from "./latent.ts";
export { gemmCodes, gemvCodes, OUTLIER_COLUMNS, outlierColumns, quantizeRows } from "./llm-int8.ts";
export { packBf16 } from "./pack-bf16.ts";
export { absmax, quantizeInt8, quantizeNf4 } from "./quantize.ts";
export { headNorm, rmsNorm } from "./rms-norm.ts";
export { rope } from "./rope.ts";
export { softcap } from "./softcap.ts";
export { TRANSPOSE_ROWS, transposeBf16 } from "./transpose-bf16.ts";
export { unpackBf16 } from "./unpack-bf16.ts";
