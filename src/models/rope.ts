import type { ConfigReader } from "./config.ts";

/** Rotary positions of a family's layers, as transformers reads them (`modeling_rope_utils.py`). */
export interface Rope {
  readonly theta: number;
  /** Dimensions of a head that are turned: the first ones. An odd number leaves half a pair, which is turned too. */
  readonly rotated: number;
  readonly scaling: RopeScaling;
  /** Positions that it is good for: with some types more than `max_position_embeddings`. */
  readonly reach: number;
}

export type RopeScaling =
  | { readonly type: "default" }
  | { readonly type: "linear"; readonly factor: number }
  | { readonly type: "dynamic"; readonly factor: number; readonly trained: number }
  | {
      readonly type: "llama3";
      readonly factor: number;
      readonly lowFreqFactor: number;
      readonly highFreqFactor: number;
      readonly trained: number;
    }
  | {
      readonly type: "yarn";
      readonly factor: number;
      readonly attentionFactor: number;
      readonly betaFast: number;
      readonly betaSlow: number;
      readonly truncate: boolean;
      readonly trained: number;
    }
  | {
      readonly type: "longrope";
      readonly attentionFactor: number;
      readonly short: readonly number[];
      readonly long: readonly number[];
      readonly trained: number;
    };

/** Types by the name that config.json gives them. */
const TYPES = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"] as const;
type RopeType = (typeof TYPES)[number];

export interface RopeFacts {
  headDim: number;
  maxPositions: number;
  /** θ where the parameters do not say it. */
  theta: number;
  /** The rotated share of a head where the parameters do not say it. Default: 1. */
  partial?: number;
  /** Whether the share counts for the type `default` too; in most families it does not. */
  partialByDefault?: boolean;
  /** Positions of the original training, where they stand elsewhere than in the parameters: then these count. */
  trained?: number;
  /** Other names of types. */
  aliases?: Readonly<Record<string, RopeType>>;
  /** Types that the family takes. Default: all. */
  types?: readonly RopeType[];
}

/** Where most families keep the parameters: a `rope_scaling` that says something counts before `rope_parameters`. */
export function ropeParameters(json: ConfigReader): ConfigReader {
  const scaling = json.nested("rope_scaling");
  return (scaling?.isEmpty === false ? scaling : json.nested("rope_parameters")) ?? json.empty("rope_parameters");
}

/** What stands beside the parameters in older files. */
export const ropeKeys = (json: ConfigReader, theta = 1e4): Pick<RopeFacts, "theta" | "partial" | "trained"> => ({
  theta: json.positive("rope_theta", theta),
  partial: json.positive("partial_rotary_factor", 1),
  trained: json.optionalCount("original_max_position_embeddings"),
});

/** @throws UserError `unsupported_model` for a type that is not known, by name. */
export function readRope(parameters: ConfigReader, facts: RopeFacts): Rope {
  const { headDim, maxPositions, partial = 1, partialByDefault = false } = facts;
  const name = parameters.has("rope_type") ? parameters.text("rope_type") : parameters.text("type", "default");
  const type = facts.aliases?.[name] ?? TYPES.find((known) => known === name);
  const known = facts.types ?? TYPES;
  if (!type || !known.includes(type)) {
    throw parameters.refuse(
      `rope_type "${name}" is not one that meshnet knows${type ? " for this family" : ""}`,
      `known are ${known.join(", ")}`,
    );
  }

  const share = parameters.positive("partial_rotary_factor", partial);
  const rotated = type === "default" && !partialByDefault ? headDim : Math.trunc(headDim * share);
  // The exponent of `dynamic` divides by rotated - 2.
  if (rotated < (type === "dynamic" ? 3 : 1) || pairsOf({ rotated }) * 2 > headDim) {
    throw parameters.refuse(
      `heads of ${headDim} dimensions cannot have ${rotated} of them turned`,
      "use the config.json that belongs to the model",
    );
  }
  const trained = facts.trained ?? parameters.count("original_max_position_embeddings", maxPositions);
  const theta = parameters.positive("rope_theta", facts.theta);
  const scaling = readScaling(type, parameters, { rotated, maxPositions, trained });
  return { theta, rotated, scaling, reach: Math.max(maxPositions, stretched(scaling)) };
}

/** Positions that a type makes of the original ones, where files leave `max_position_embeddings` at those. */
function stretched(scaling: RopeScaling): number {
  return scaling.type === "dynamic" || scaling.type === "yarn" ? Math.floor(scaling.trained * scaling.factor) : 0;
}

function readScaling(
  type: RopeType,
  json: ConfigReader,
  { rotated, maxPositions, trained }: { rotated: number; maxPositions: number; trained: number },
): RopeScaling {
  const attentionFactor = json.has("attention_factor") ? json.positive("attention_factor") : undefined;
  switch (type) {
    case "default":
      return { type };
    case "linear":
      return { type, factor: json.positive("factor") };
    case "dynamic":
      return { type, factor: json.positive("factor"), trained: maxPositions };
    case "llama3":
      return {
        type,
        factor: json.positive("factor"),
        lowFreqFactor: json.positive("low_freq_factor"),
        highFreqFactor: json.positive("high_freq_factor"),
        trained,
      };
    case "yarn": {
      const factor = json.positiveUnlessNull("factor", undefined) ?? maxPositions / trained;
      return {
        type,
        factor,
        attentionFactor: attentionFactor ?? yarnAttentionFactor(json, factor),
        betaFast: json.has("beta_fast") ? json.positive("beta_fast") : 32,
        betaSlow: json.has("beta_slow") ? json.positive("beta_slow") : 1,
        truncate: json.flag("truncate", true),
        trained,
      };
    }
    case "longrope": {
      const factor = json.has("factor") ? json.positive("factor") : maxPositions / trained;
      const pairs = pairsOf({ rotated });
      return {
        type,
        attentionFactor: attentionFactor ?? (factor <= 1 ? 1 : Math.sqrt(1 + Math.log(factor) / Math.log(trained))),
        short: json.positives("short_factor", pairs),
        long: json.positives("long_factor", pairs),
        trained,
      };
    }
  }
}

/** What cosines and sines of yarn are multiplied by. */
function yarnAttentionFactor(json: ConfigReader, factor: number): number {
  const [mscale, allDim] = ["mscale", "mscale_all_dim"].map((key) => (json.has(key) ? json.number(key) : 0));
  return mscale && allDim ? yarnScale(factor, mscale) / yarnScale(factor, allDim) : yarnScale(factor, 1);
}

/** 0.1 m ln(factor) + 1: also what a family with `mscale_all_dim` multiplies its scores by, squared. */
export const yarnScale = (factor: number, mscale: number): number =>
  factor <= 1 ? 1 : 0.1 * mscale * Math.log(factor) + 1;

/** Where `longrope` goes over to its long factors. */
export const contextEdgeOf = (ropes: readonly Rope[]): number | undefined =>
  ropes.map(({ scaling }) => (scaling.type === "longrope" ? scaling.trained : undefined)).find((edge) => edge);

/** The ropes of a configuration, by the names that its layers use, and what follows from them. */
export const withRopes = (ropes: Readonly<Record<string, Rope>>) => ({
  ropes,
  contextEdge: contextEdgeOf(Object.values(ropes)),
  maxPositions: Math.max(...Object.values(ropes).map(({ reach }) => reach)),
});

/** Pairs of dimensions that are turned. */
export const pairsOf = ({ rotated }: Pick<Rope, "rotated">): number => Math.ceil(rotated / 2);

/**
 * Fills in cosines and sines of a position, [pairs] each, for a node whose sequences have up to `maxContext` tokens.
 *
 * Frequencies and angles are float32, as transformers has them; their cosines and sines are rounded once.
 *
 * - `dynamic`: transformers recomputes the frequencies as a sequence grows and leaves the keys in the cache as they
 *   were. Here a token is turned as that turns it when it decodes it: by the frequencies for a sequence that ends with it.
 *   So a token's bits depend neither on what follows nor on how the sequence is cut into calls.
 * - `longrope`: the long factors where `maxContext` exceeds the original length, else the short ones, for every
 *   position. transformers decides by the length of each sequence, and reads all of it again when that changes.
 */
export function ropeAngles(rope: Rope, maxContext: number) {
  const { scaling } = rope;
  const attentionFactor = "attentionFactor" in scaling ? scaling.attentionFactor : 1;
  const frequenciesAt = ropeFrequencies(rope, maxContext);
  return (position: number, cosines: Float32Array, sines: Float32Array): void => {
    frequenciesAt(position).forEach((frequency, pair) => {
      const angle = Math.fround(position * frequency);
      cosines[pair] = Math.fround(Math.cos(angle)) * attentionFactor;
      sines[pair] = Math.fround(Math.sin(angle)) * attentionFactor;
    });
  };
}

/** [pairs] float32 for each position. */
export function ropeFrequencies(rope: Rope, maxContext: number): (position: number) => Float32Array {
  const { theta, scaling } = rope;
  const base = baseFrequencies(rope, theta);
  switch (scaling.type) {
    case "default":
      return () => base;
    case "linear": {
      const scaled = base.map((frequency) => frequency / scaling.factor);
      return () => scaled;
    }
    case "dynamic": {
      const { factor, trained } = scaling;
      const exponent = rope.rotated / (rope.rotated - 2);
      return (position) => {
        const length = Math.max(position + 1, trained);
        if (length === trained) return base;
        return baseFrequencies(rope, theta * ((factor * length) / trained - (factor - 1)) ** exponent);
      };
    }
    case "llama3": {
      const scaled = base.map((frequency) => llama3Frequency(frequency, scaling));
      return () => scaled;
    }
    case "yarn": {
      const scaled = yarnFrequencies(rope, scaling);
      return () => scaled;
    }
    case "longrope": {
      const factors = maxContext > scaling.trained ? scaling.long : scaling.short;
      const scaled = periods(rope, theta).map((period, pair) => 1 / Math.fround(Math.fround(factors[pair]!) * period));
      return () => scaled;
    }
  }
}

/** θ^(2i/d) in the steps in which torch makes it in float32: that reproduces its bits for nearly every value. */
const periods = ({ rotated }: Rope, theta: number): Float32Array =>
  Float32Array.from({ length: pairsOf({ rotated }) }, (_, pair) => theta ** Math.fround((2 * pair) / rotated));

const baseFrequencies = (rope: Rope, theta: number): Float32Array => periods(rope, theta).map((period) => 1 / period);

function llama3Frequency(frequency: number, scaling: RopeScaling & { type: "llama3" }): number {
  const { factor, lowFreqFactor, highFreqFactor, trained } = scaling;
  const wavelength = (2 * Math.PI) / frequency;
  if (wavelength < trained / highFreqFactor) return frequency;
  if (wavelength > trained / lowFreqFactor) return frequency / factor;
  const smooth = (trained / wavelength - lowFreqFactor) / (highFreqFactor - lowFreqFactor);
  return ((1 - smooth) * frequency) / factor + smooth * frequency;
}

/** Fast pairs keep their frequency, slow ones are slowed down by the factor, those between by a share of it. */
function yarnFrequencies(rope: Rope, scaling: RopeScaling & { type: "yarn" }): Float32Array {
  const { rotated, theta } = rope;
  const { factor, betaFast, betaSlow, truncate, trained } = scaling;
  /** The dimension whose wave turns so many times over the original length. */
  const dimensionOf = (turns: number): number =>
    (rotated * Math.log(trained / (turns * 2 * Math.PI))) / (2 * Math.log(theta));
  const [fast, slow] = [dimensionOf(betaFast), dimensionOf(betaSlow)];
  const low = Math.max(truncate ? Math.floor(fast) : fast, 0);
  const high = Math.min(truncate ? Math.ceil(slow) : slow, rotated - 1);
  const width = high === low ? 0.001 : high - low;

  const { fround } = Math;
  return periods(rope, theta).map((period, pair) => {
    const ramp = fround(fround(pair - low) / fround(width));
    const kept = fround(1 - Math.min(Math.max(ramp, 0), 1));
    const slowed = fround(1 / fround(factor * period));
    return fround(slowed * fround(1 - kept)) + fround(fround(1 / period) * kept);
  });
}
