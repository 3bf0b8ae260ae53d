import { ceilDiv } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { WeightSpec } from "../nn/index.ts";
import { FP8_BLOCK } from "../quant/fp8.ts";
import type { Checkpoint, CheckpointTensor } from "../safetensors/checkpoint.ts";

/** The name under which a checkpoint keeps the factors of a weight in FP8. */
export const scalesName = (weight: string): string => `${weight}_scale_inv`;

/**
 * The factors of a matrix that the checkpoint keeps in FP8, or undefined where it is an ordinary tensor.
 * @throws UserError `bad_model` where they are missing or not one for each block.
 */
export function findBlockScales(
  { kind, rows, columns, storedTransposed }: WeightSpec,
  { name, file, dtype }: CheckpointTensor,
  { tensors }: Checkpoint,
): CheckpointTensor | undefined {
  if (dtype !== "F8_E4M3" || kind !== "matrix" || storedTransposed) return undefined; // said by the plan
  const scales = tensors.get(scalesName(name));
  const expected = [ceilDiv(rows, FP8_BLOCK), ceilDiv(columns, FP8_BLOCK)];
  const found = scales && `${scales.dtype} [${scales.shape.join(", ")}]`;
  if (scales && found === `F32 [${expected.join(", ")}]`) return scales;
  throw new UserError(
    "bad_model",
    `${file.name}: tensor ${name} is FP8, and ${scalesName(name)} is ${found ?? "missing"}, not F32 [${expected.join(", ")}]`,
    `use a complete checkpoint with a factor for each block of ${FP8_BLOCK} × ${FP8_BLOCK}`,
  );
}
