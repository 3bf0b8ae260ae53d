import { UserError } from "../../base/errors.ts";
import { parseJson } from "../../base/json.ts";
import { quote } from "../../base/quote.ts";
import { type GenerationDefaults, withDefaults } from "../../models/generation-config.ts";
import { checkSamplingField, type Sampling } from "../../protocol/sampling.ts";
import { Fields, impossible, isObject, lacking } from "./fields.ts";

/** What both kinds of call come to: beginnings of texts, and how they go on. */
export interface TextRequest {
  readonly prompts: readonly Prompt[];
  /** Texts for each prompt. */
  readonly choices: number;
  /** Tokens of each text, at most. */
  readonly maxTokens: number;
  /** Without a seed. */
  readonly sampling: Sampling;
  readonly seed: number | undefined;
  /** Strings that end a text and are not part of it. */
  readonly stops: readonly string[];
  /** The prompt is a part of the text. */
  readonly echo: boolean;
  /** The text follows that of the prompt, rather than being one of its own. */
  readonly continues: boolean;
  readonly stream: boolean;
  /** The last event of a stream tells the usage. */
  readonly includeUsage: boolean;
}

export interface Prompt {
  readonly ids: Int32Array;
  readonly text: string;
}

/** What a request is read against. */
export interface TextFacts {
  readonly maxContext: number;
  readonly vocabSize: number;
  readonly defaults: GenerationDefaults;
}

/** OpenAI's own limits. */
const MOST_CHOICES = 128;
const MOST_STOPS = 4;

/**
 * What both kinds of call have in common. Throws UserError `malformed` or `not_supported`, with the `param`.
 */
export function readCommon(
  fields: Fields,
  { defaults, vocabSize }: TextFacts,
): Pick<TextRequest, "choices" | "sampling" | "seed" | "stops" | "stream" | "includeUsage"> {
  refuseWhatIsMissing(fields);
  const stream = fields.flag("stream") ?? false;
  const streamOptions = fields.object("stream_options");
  if (streamOptions && !stream) {
    throw impossible("stream_options", "came without a stream", "set stream to true, or leave stream_options away");
  }
  return {
    choices: fields.count("n", 1, MOST_CHOICES) ?? 1,
    sampling: readSampling(fields, defaults, vocabSize),
    seed: samplingField(fields, "seed"),
    stops: readStops(fields.get("stop")),
    stream,
    includeUsage: new Fields(streamOptions ?? {}).flag("include_usage") ?? false,
  };
}

/**
 * The model's own values stand where the caller says nothing, as with vLLM; but a temperature of 1 and no filter, as
 * with OpenAI, for a model that does not ask for drawing.
 */
function readSampling(fields: Fields, defaults: GenerationDefaults, vocabSize: number): Sampling {
  const plain: GenerationDefaults = { ...defaults, doSample: true, temperature: 1, topK: 0, topP: 1, minP: 0 };
  const asked = {
    temperature: fields.number("temperature", 0, MOST_TEMPERATURE),
    top_k: fields.get("top_k") === -1 ? 0 : samplingField(fields, "top_k"), // how vLLM writes "all"
    top_p: samplingField(fields, "top_p"),
    min_p: samplingField(fields, "min_p"),
    repetition_penalty: samplingField(fields, "repetition_penalty"),
  };
  const { temperature, repetition_penalty, ...filters } = withDefaults(asked, defaults.doSample ? defaults : plain);
  const stops = samplingField(fields, "stop_token_ids");
  const stranger = stops?.find((id) => id >= vocabSize);
  if (stranger !== undefined) {
    const problem = `has the token id ${stranger}, and this model's go from 0 to ${vocabSize - 1}`;
    throw impossible("stop_token_ids", problem, "give ids of this model's tokenizer");
  }
  return {
    temperature,
    ...(temperature > 0 && filters),
    ...(repetition_penalty !== 1 && { repetition_penalty }),
    ...(stops && { stop_token_ids: stops }),
  };
}

const MOST_TEMPERATURE = 2;

function samplingField<Name extends keyof Sampling>(fields: Fields, name: Name): Sampling[Name] {
  const value = fields.get(name);
  if (value === undefined) return undefined;
  try {
    checkSamplingField(name, value, `${name} is`);
  } catch (error) {
    if (!(error instanceof UserError)) throw error;
    throw new UserError(error.code, error.message, error.hint, { details: { param: name } });
  }
  return value as Sampling[Name];
}

function readStops(value: unknown): string[] {
  if (value === undefined) return [];
  const stops: unknown[] = Array.isArray(value) ? value : [value];
  const hint = `give a text, or a list of at most ${MOST_STOPS}`;
  if (stops.length > MOST_STOPS) throw impossible("stop", `has ${stops.length} strings`, hint);
  for (const stop of stops) {
    if (typeof stop !== "string") throw impossible("stop", `has ${quote(stop)}, which is no text`, hint);
    if (stop === "") throw impossible("stop", "has an empty string, which would end every text", "leave it away");
  }
  return stops as string[];
}

/** Left unsaid, these would change what a caller gets without telling. Values that mean nothing are fine. */
function refuseWhatIsMissing(fields: Fields): void {
  const bias = fields.object("logit_bias");
  if (bias && Object.keys(bias).length > 0) throw lacking("logit_bias", "is not supported", "leave it away");
  for (const name of ["frequency_penalty", "presence_penalty"]) {
    const penalty = fields.number(name, -2, 2) ?? 0;
    if (penalty !== 0) {
      throw lacking(name, `is ${penalty}, and only 0 is supported`, "leave it away, or use repetition_penalty");
    }
  }
  const format = fields.object("response_format");
  if (format && format["type"] !== "text") {
    const problem = `asks for ${quote(format["type"])}, and only text is supported`;
    throw lacking("response_format", problem, "ask for the form in the prompt, and check what comes");
  }
  const modalities = fields.get("modalities");
  if (Array.isArray(modalities) && modalities.some((kind) => kind !== "text")) {
    throw lacking("modalities", `are ${quote(modalities)}, and only text is supported`, "leave them away");
  }
  if (fields.get("audio") !== undefined) throw lacking("audio", "is not supported", "leave it away");
}

/**
 * Checks a prompt against the context, and gives how many tokens may follow it: `asked`, or by default `usual`, cut to what is left.
 * Throws UserError `context_exceeded` with OpenAI's rule: prompt and `asked` tokens together fit into the context.
 */
export function tokensAfter(
  prompts: readonly Prompt[],
  { asked, usual, param }: { asked: number | undefined; usual: number; param: string },
  { maxContext }: TextFacts,
): number {
  const longest = Math.max(...prompts.map(({ ids }) => ids.length));
  const left = maxContext - longest;
  if (left < (asked ?? 1)) {
    const wish = asked === undefined ? "" : ` and ${asked} are to follow`;
    throw new UserError(
      "context_exceeded",
      `the context is ${maxContext} tokens; the prompt has ${longest}${wish}`,
      left > 0 && asked !== undefined ? `ask for at most ${left} tokens, or shorten the prompt` : "shorten the prompt",
      { details: { param } },
    );
  }
  return asked ?? Math.min(usual, left);
}

/** More characters than this cannot be one prompt: it is refused before a tokenizer spends minutes on it. */
export function checkLength(characters: number, param: string, { maxContext }: TextFacts): void {
  const most = 65536 + 64 * maxContext;
  if (characters <= most) return;
  throw new UserError(
    "context_exceeded",
    `the prompt has ${characters} characters, and the context is ${maxContext} tokens`,
    "send a shorter prompt",
    { details: { param } },
  );
}

/** Throws UserError `malformed`. */
export function readJsonObject(body: Uint8Array): Fields {
  let value: unknown;
  try {
    value = parseJson(new TextDecoder("utf-8", { fatal: true }).decode(body));
  } catch (cause) {
    if (cause instanceof RangeError) throw new UserError("malformed", cause.message, "send flatter JSON", { cause });
    throw new UserError("malformed", "the body is not JSON in UTF-8", "send a JSON object", { cause });
  }
  if (isObject(value)) return new Fields(value);
  throw new UserError("malformed", "the JSON body is not an object", "send a JSON object");
}
