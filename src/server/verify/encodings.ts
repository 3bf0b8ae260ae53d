import type { QualityBounds } from "../logit-quality.ts";
import type { NodeConfig } from "../plan-node.ts";

type Flags = Pick<NodeConfig, "quantization" | "int8Activations">;

/** What bfloat16 is compared with, by the flags of a node. */
const COMPARED = {
  int8: { quantization: "int8" },
  "int8-activations": { quantization: "int8", int8Activations: true },
  nf4: { quantization: "nf4" },
} as const satisfies Record<string, Flags>;
export type Compared = keyof typeof COMPARED;
export type EncodingName = Compared | "bfloat16";

export const flagsOf = (name: EncodingName): Flags => (name === "bfloat16" ? { quantization: name } : COMPARED[name]);

/**
 * What an encoding may cost. Between what right encodings measure with gpt2-tiny, a small model that takes them badly
 * (relative rms and KL: int8 0.015 and 0.002, nf4 0.19 and 0.25), and what wrong ones do (scales of the next row or block:
 * int8 0.47 and 1.4, nf4 0.47 and 0.87), so that a model which takes an encoding worse than most is not called broken. See
 * docs/verify.md.
 */
export const BOUNDS: Readonly<Record<Compared, QualityBounds>> = {
  int8: { relativeRms: 0.1, klDivergence: 0.05, sureAgreement: 0.95, perplexityRatio: 1.1 },
  "int8-activations": { relativeRms: 0.1, klDivergence: 0.05, sureAgreement: 0.95, perplexityRatio: 1.1 },
  nf4: { relativeRms: 0.4, klDivergence: 0.5, sureAgreement: 0.7, perplexityRatio: 1.5 },
};
