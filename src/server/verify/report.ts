import type { LogitQuality, QualityBounds } from "../logit-quality.ts";
import type { EncodingName } from "./encodings.ts";

interface Subject {
  readonly schema: 1;
  readonly model: {
    readonly id: string;
    readonly revision: string;
    readonly type: string;
    readonly layers: number;
    readonly parameters: number;
  };
  readonly device: { readonly name: string; readonly driver: string };
  readonly problems: readonly string[];
  readonly ok: boolean;
}

/** The answer of `meshnet verify --json`, as docs/verify.md describes it. */
export interface Verification extends Subject {
  readonly text: {
    readonly source: string;
    readonly tokens: number;
    readonly sequences: number;
    /** Tokens that follow another one, and are predicted. */
    readonly predicted: number;
  };
  /** The layer at which the model was cut; null where it has only one. */
  readonly cut: number | null;
  /** bfloat16, then what is compared with it; nothing where the checkpoint itself is broken. */
  readonly encodings: readonly EncodingReport[];
}

export interface EncodingReport {
  readonly name: EncodingName;
  readonly bytesPerParameter: {
    /** Of the weights that bitsandbytes would quantize, scales included. */
    readonly quantized: number;
    readonly model: number;
  };
  readonly perplexity: number;
  /** Against bfloat16, and what it is judged by; null for bfloat16 itself. */
  readonly quality: LogitQuality | null;
  readonly bounds: QualityBounds | null;
  /** Whether a second run gave the same bits. */
  readonly sameTwice: boolean;
  /** Whether the model, cut in two, gave the same bits; null where it cannot be cut. */
  readonly sameCut: boolean | null;
}

/** The answer with a reference. */
export interface ReferenceVerification extends Subject {
  readonly reference: {
    readonly file: string;
    readonly prompts: readonly { readonly name: string; readonly tokens: number }[];
  };
  /** bfloat16 after each layer, after the final norm and at the logits. As far as it came. */
  readonly layers: readonly LayerReport[];
  /** The first of them that is outside its bounds; null without one. */
  readonly firstDiverging: string | null;
  /** What the reference's own bfloat16 run costs in its logits; null where nothing was compared. */
  readonly referenceQuality: ReferenceQuality | null;
  /** bfloat16, then the others. */
  readonly encodings: readonly ReferenceEncoding[];
}

/** Errors of values, over all prompts. */
export interface LayerReport {
  /** `layer 0` and so on, `final norm`, `logits`. */
  readonly name: string;
  /** The rms distance of meshnet's values to the reference's float32 ones, as a part of each token's own rms. */
  readonly relativeRms: number;
  /** The same of the reference's own bfloat16 values: the noise. */
  readonly relativeNoise: number;
  /** The largest single differences, as they are. */
  readonly maxError: number;
  readonly maxNoise: number;
  /** The relative rms distance to float32 over the noise: at most `MOST_TO_FLOAT32`. */
  readonly toFloat32: number;
  /** That to the reference's bfloat16 over the noise: at most `MOST_TO_BFLOAT16`. */
  readonly toBfloat16: number;
  /** The prompt that is furthest off. */
  readonly prompt: string;
  readonly isWithin: boolean;
}

export type ReferenceQuality = Omit<LogitQuality, "perplexity" | "perplexityRatio">;

export interface ReferenceEncoding {
  readonly name: EncodingName;
  /** Logits, against the reference's in float32. */
  readonly quality: ReferenceQuality;
  /** Null for bfloat16, which is judged layer by layer. */
  readonly bounds: Omit<QualityBounds, "perplexityRatio"> | null;
  /** Whether the model, cut after every layer, gave the same bits as whole; null with one layer. */
  readonly sameCuts: boolean | null;
  /**
   * Whether prompts that came in pieces gave the same bits as whole; null for exact LLM.int8(), whose numbers depend on
   * which tokens come together.
   */
  readonly samePieces: boolean | null;
}
