export {
  activation,
  type Activation,
  type ActivationName,
  gatedActivation,
  type GatedActivation,
} from "./activation.ts";
export { attention, type Attention, cacheLabels, cacheWords, PAGE_TOKENS, PREFILL_QUERIES } from "./attention.ts";
export { positionEmbedding, type PositionEmbedding, tokenEmbedding, type TokenEmbedding } from "./embedding.ts";
export { addGated, type AddGated, experts, type Experts } from "./experts.ts";
export { headByHead, type HeadColumns, type QkvLayout, sideBySide } from "./heads.ts";
export { layerNorm, type LayerNorm } from "./layer-norm.ts";
export { latentAttention, type LatentAttention } from "./latent-attention.ts";
export type { Linear } from "./linear-spec.ts";
export { linear } from "./linear.ts";
export type { Encoding, ExpertPart, ExpertStack, Matrix, MatrixPart } from "./matrix.ts";
export {
  type BuildContext,
  type ModuleSpec,
  temporary,
  type TemporarySpec,
  type WeightSource,
  type WeightSpec,
} from "./module.ts";
export type { Activations, AttentionRuns, Pass, Temporaries } from "./pass.ts";
export { compileProducts, rowStepOf } from "./products.ts";
export { residual, type Residual } from "./residual.ts";
export { headNorm, type HeadNorm, rmsNorm, type RmsNorm, type RmsNormForm } from "./rms-norm.ts";
export { rope, type Rope, ropeTable, type RopeTableSpec } from "./rope.ts";
export { route, type Route, type RouteSpec } from "./router.ts";
export { softcap, type Softcap } from "./softcap.ts";
