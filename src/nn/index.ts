export { activation, type Activation } from "./activation.ts";
export { attention, type Attention, cacheWords, DECODE_ROWS, PREFILL_QUERIES } from "./attention.ts";
export { positionEmbedding, type PositionEmbedding } from "./embedding.ts";
export { layerNorm, type LayerNorm } from "./layer-norm.ts";
export type { Linear } from "./linear-spec.ts";
export { linear } from "./linear.ts";
export type { Encoding, Matrix, MatrixPart } from "./matrix.ts";
export {
  type BuildContext,
  type ModuleSpec,
  temporary,
  type TemporarySpec,
  type WeightSource,
  type WeightSpec,
} from "./module.ts";
export type { Activations, AttentionRuns, LayerCache, Pass, Temporaries } from "./pass.ts";
export { residual, type Residual } from "./residual.ts";
