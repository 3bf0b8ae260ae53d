import { UserError } from "../base/errors.ts";
import { ConfigReader } from "./config.ts";
import type { Family } from "./family.ts";
import type { ModelConfig } from "./config.ts";
import { deepseekV2, deepseekV3 } from "./deepseek.ts";
import { gemma } from "./gemma.ts";
import { gemma2 } from "./gemma2.ts";
import { gemma3, gemma3Text } from "./gemma3.ts";
import { gptNeox } from "./gpt-neox.ts";
import { gpt2 } from "./gpt2.ts";
import { llama } from "./llama.ts";
import { ministral, mistral } from "./mistral.ts";
import { mixtral } from "./mixtral.ts";
import { phi3 } from "./phi3.ts";
import { qwen2Moe } from "./qwen2-moe.ts";
import { qwen2 } from "./qwen2.ts";
import { qwen3Moe } from "./qwen3-moe.ts";
import { qwen3 } from "./qwen3.ts";

export { type ModelConfig, readQuantization, type StoredQuantization } from "./config.ts";
export { type Family, logitRowsFor, type Model, type StageOptions } from "./family.ts";

const FAMILIES: readonly Family[] = [
  gpt2,
  gptNeox,
  llama,
  mistral,
  ministral,
  qwen2,
  qwen3,
  gemma,
  gemma2,
  gemma3Text,
  gemma3,
  phi3,
  mixtral,
  qwen2Moe,
  qwen3Moe,
  deepseekV2,
  deepseekV3,
];

/** The family and configuration that a config.json describes. An unknown `model_type` is refused, never guessed. */
export function readModel(json: Record<string, unknown>): { family: Family; config: ModelConfig } {
  const reader = new ConfigReader(json);
  const modelType = reader.text("model_type");
  const family = FAMILIES.find((candidate) => candidate.modelType === modelType);
  if (!family) {
    throw new UserError(
      "unsupported_model",
      `config.json: model_type "${modelType}" is not a family that meshnet knows`,
      `known are ${FAMILIES.map((candidate) => candidate.modelType).join(", ")}`,
    );
  }
  return { family, config: family.parseConfig(reader) };
}
