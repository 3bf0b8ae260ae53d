import { UserError } from "../base/errors.ts";

type Json = Readonly<Record<string, unknown>>;

/** What a model asks for where a caller says nothing. */
export interface GenerationDefaults {
  /** Any of these ends a text, and belongs to it. May be empty. */
  readonly eosTokenIds: readonly number[];
  /** Draw tokens; else the likeliest is taken, whatever the fields below say. */
  readonly doSample: boolean;
  readonly temperature: number;
  /** 0: all tokens. */
  readonly topK: number;
  readonly topP: number;
  readonly minP: number;
  /** Acts on greedy text too. */
  readonly repetitionPenalty: number;
  readonly maxNewTokens: number | undefined;
}

/** transformers' own (`GenerationConfig._get_default_generation_params`): sampling without a setting is top-50 sampling. */
const GLOBAL = { do_sample: false, temperature: 1, top_k: 50, top_p: 1, min_p: 0, repetition_penalty: 1 } as const;

/**
 * As transformers takes them: generation_config.json alone where a model has one (undefined: it has none), else the same
 * keys of config.json, or of its `text_config`; then the global defaults. `null` is as good as absent.
 *
 * Throws UserError `bad_model` naming file and key for a value that cannot be.
 */
export function generationDefaults(generation: Json | undefined, config: Json): GenerationDefaults {
  const text = config["text_config"];
  const nested = typeof text === "object" && text !== null ? (text as Json) : {};
  const file = generation ? "generation_config.json" : "config.json";
  const said = (key: string): unknown => (generation ? generation[key] : (config[key] ?? nested[key])) ?? undefined;
  const read = <T>(key: string, fallback: T, allowed: string, ok: (value: number) => boolean): number | T => {
    const value = said(key);
    if (value === undefined) return fallback;
    if (typeof value === "number" && ok(value)) return value;
    throw wrong(file, key, value, allowed);
  };

  const { do_sample, temperature, top_k, top_p, min_p, repetition_penalty } = GLOBAL;
  return {
    eosTokenIds: idsOf(file, said("eos_token_id")),
    doSample: flag(file, "do_sample", said("do_sample") ?? do_sample),
    temperature: read("temperature", temperature, "a number from 0", (value) => value >= 0),
    topK: read("top_k", top_k, "a whole number from 0", isCount),
    topP: read("top_p", top_p, "a number above 0, up to 1", (value) => value > 0 && value <= 1),
    minP: read("min_p", min_p, "a number from 0 to 1", (value) => value >= 0 && value <= 1),
    repetitionPenalty: read("repetition_penalty", repetition_penalty, "a number above 0", (value) => value > 0),
    maxNewTokens: read("max_new_tokens", undefined, "a whole number from 0", isCount),
  };
}

/** What a caller said, in the names of the wire. */
export interface AskedSampling {
  readonly temperature?: number;
  readonly top_k?: number;
  readonly top_p?: number;
  readonly min_p?: number;
  readonly repetition_penalty?: number;
}

/**
 * The caller's word before the model's, complete. A temperature alone decides between drawing and greedy: where the
 * caller gives none, asking for top_k, top_p or min_p asks for drawing, and else the model says which. Greedy is
 * `temperature: 0`.
 */
export function withDefaults(asked: AskedSampling, defaults: GenerationDefaults): Required<AskedSampling> {
  const { top_k, top_p, min_p } = asked;
  const isDrawn = defaults.doSample || [top_k, top_p, min_p].some((field) => field !== undefined);
  return {
    temperature: asked.temperature ?? (isDrawn ? defaults.temperature : 0),
    top_k: top_k ?? defaults.topK,
    top_p: top_p ?? defaults.topP,
    min_p: min_p ?? defaults.minP,
    repetition_penalty: asked.repetition_penalty ?? defaults.repetitionPenalty,
  };
}

const isCount = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;

/** One id or a list of them; some configs say -1 for none. */
function idsOf(file: string, value: unknown): number[] {
  if (value === undefined) return [];
  const ids = [value].flat();
  if (!ids.every(Number.isSafeInteger)) throw wrong(file, "eos_token_id", value, "a token id or a list of them");
  return ids.filter(isCount);
}

function flag(file: string, key: string, value: unknown): boolean {
  if (typeof value === "boolean") return value;
  throw wrong(file, key, value, "true or false");
}

const wrong = (file: string, key: string, value: unknown, allowed: string): UserError =>
  new UserError(
    "bad_model",
    `${file}: ${key} is ${JSON.stringify(value)}, and it can be ${allowed}`,
    "correct the file, or fetch it again",
  );
