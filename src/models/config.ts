import { UserError } from "../base/errors.ts";
import { quote } from "../base/quote.ts";

/** What every family's configuration tells the rest of the program. */
export interface ModelConfig {
  readonly modelType: string;
  readonly vocabSize: number;
  readonly hiddenSize: number;
  readonly layers: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  /** Positions that the model knows. */
  readonly maxPositions: number;
  readonly tieWordEmbeddings: boolean;
  /** Where a node whose context is longer than this computes something else than one whose is not. */
  readonly contextEdge?: number;
}

/** Of whatever a configuration counts but layers: beyond it, products of two would lose digits. */
const MOST = 2 ** 26;
/** Layers are gone through one by one before anything is loaded. The deepest models have some hundreds. */
export const MOST_LAYERS = 20_000;

export type StoredQuantization = "nf4" | "fp4" | "int8";

/**
 * What `quantization_config` says of the checkpoint's weights (transformers, `BitsAndBytesConfig`); undefined where they
 * are ordinary, or FP8 that becomes so when it is loaded. Which of them are quantized, the tensors themselves say.
 */
export function readQuantization(json: Readonly<Record<string, unknown>>): StoredQuantization | undefined {
  const config = json["quantization_config"];
  if (config === undefined || config === null) return undefined;
  if (Object(config) !== config || Array.isArray(config)) {
    throw new UserError(
      "bad_model",
      `config.json: "quantization_config" is ${quote(config)}, and it can be an object`,
      "use the config.json that belongs to the weights",
    );
  }
  const { quant_method, load_in_4bit, load_in_8bit, bnb_4bit_quant_type = "fp4" } = config as Record<string, unknown>;
  const refuse = (problem: string) =>
    new UserError(
      "unsupported_model",
      `config.json: quantization_config ${problem}`,
      "meshnet reads those of bitsandbytes, int8, nf4 and fp4, and FP8 in blocks of 128 × 128",
    );
  if (quant_method === "fp8") {
    // Values of ordinary weights: they are converted as F32 ones are. What activations would be rounded to is not done.
    const { weight_block_size: block = [128, 128] } = config as Record<string, unknown>;
    if (JSON.stringify(block) === "[128,128]") return undefined;
    throw refuse(`has the quant_method "fp8" with a weight_block_size of ${quote(block)}`);
  }
  if (quant_method === undefined) throw refuse("has no quant_method");
  if (quant_method !== "bitsandbytes") throw refuse(`has the quant_method ${quote(quant_method)}`);
  if (load_in_8bit === true) return "int8";
  if (load_in_4bit !== true) throw refuse("says neither load_in_4bit nor load_in_8bit");
  if (bnb_4bit_quant_type === "nf4" || bnb_4bit_quant_type === "fp4") return bnb_4bit_quant_type;
  throw refuse(`has the bnb_4bit_quant_type ${quote(bnb_4bit_quant_type)}`);
}

/** Reads typed keys out of a config.json. A missing key takes the family's own default; a wrong one is refused by name. */
export class ConfigReader {
  constructor(
    private readonly json: Readonly<Record<string, unknown>>,
    private readonly file = "config.json",
  ) {}

  /** A whole number from 1 to `most`. */
  count(key: string, fallback?: number, most = MOST): number {
    return this.#read(
      key,
      fallback,
      `a whole number from 1 to ${most}`,
      (value) => Number.isSafeInteger(value) && (value as number) > 0 && (value as number) <= most,
    );
  }

  /** A whole number from 0 on. */
  wholeNumber(key: string, fallback?: number): number {
    const fits = (value: unknown) => Number.isSafeInteger(value) && (value as number) >= 0;
    return this.#read(key, fallback, "a whole number from 0 on", fits);
  }

  /** A number between 0 and 1, without the two: what is added under a root, a share. */
  fraction(key: string, fallback?: number): number {
    const fits = (value: unknown) => typeof value === "number" && value > 0 && value < 1;
    return this.#read(key, fallback, "a number above 0 and below 1", fits);
  }

  number(key: string, fallback?: number): number {
    return this.#read(key, fallback, "a number", (value) => typeof value === "number" && Number.isFinite(value));
  }

  flag(key: string, fallback?: boolean): boolean {
    return this.#read(key, fallback, "true or false", (value) => typeof value === "boolean");
  }

  text(key: string, fallback?: string): string {
    return this.#read(key, fallback, "a string", (value) => typeof value === "string");
  }

  /** `null` counts as missing: for keys whose default is to be worked out. */
  optionalCount(key: string): number | undefined {
    return this.has(key) ? this.count(key) : undefined;
  }

  /** Whether the key is there and not `null`. */
  has(key: string): boolean {
    return Object.hasOwn(this.json, key) && this.json[key] !== null && this.json[key] !== undefined;
  }

  /** A missing key takes `fallback`, and `null` says that there is none: a window, a cap. */
  countUnlessNull(key: string, fallback: number | undefined): number | undefined {
    return this.#isNull(key) ? undefined : this.has(key) ? this.count(key) : fallback;
  }

  /** The same for a number above 0. */
  positiveUnlessNull(key: string, fallback: number | undefined): number | undefined {
    return this.#isNull(key) ? undefined : this.has(key) ? this.positive(key) : fallback;
  }

  /** A number above 0. */
  positive(key: string, fallback?: number): number {
    const fits = (value: unknown) => typeof value === "number" && Number.isFinite(value) && value > 0;
    return this.#read(key, fallback, "a number above 0", fits);
  }

  /** A list of so many numbers above 0. */
  positives(key: string, length: number): number[] {
    const fits = (value: unknown) =>
      Array.isArray(value) &&
      value.length === length &&
      value.every((each) => typeof each === "number" && Number.isFinite(each) && each > 0);
    return this.#read<number[]>(key, undefined, `a list of ${length} numbers above 0`, fits);
  }

  /** A list of whole numbers from 0 on. A missing key or `null`: an empty one. */
  wholeNumbers(key: string): number[] {
    const fits = (value: unknown) =>
      Array.isArray(value) && value.every((each) => Number.isSafeInteger(each) && (each as number) >= 0);
    return this.has(key) ? this.#read<number[]>(key, undefined, "a list of whole numbers from 0 on", fits) : [];
  }

  /** A list of strings, one for each of `length` things. `null` counts as missing. */
  optionalTexts(key: string, length: number): string[] | undefined {
    if (!this.has(key)) return undefined;
    const fits = (value: unknown) =>
      Array.isArray(value) && value.length === length && value.every((each) => typeof each === "string");
    return this.#read<string[]>(key, undefined, `a list of ${length} strings`, fits);
  }

  /** A nested object, or undefined where the key is missing or `null`. */
  nested(key: string): ConfigReader | undefined {
    if (!this.has(key)) return undefined;
    const fits = (value: unknown) => typeof value === "object" && value !== null && !Array.isArray(value);
    const json = this.#read<Record<string, unknown>>(key, undefined, "an object", fits);
    return new ConfigReader(json, `${this.file}: ${key}`);
  }

  /** A nested object that says nothing. */
  empty(key: string): ConfigReader {
    return new ConfigReader({}, `${this.file}: ${key}`);
  }

  /** A value as the file has it. */
  raw(key: string): unknown {
    return Object.hasOwn(this.json, key) ? this.json[key] : undefined;
  }

  /** This object without a key. */
  without(key: string): ConfigReader {
    return new ConfigReader(Object.fromEntries(Object.entries(this.json).filter(([name]) => name !== key)), this.file);
  }

  get isEmpty(): boolean {
    return Object.keys(this.json).length === 0;
  }

  /** This object, with the keys of another where they are there. */
  overlaid(by: ConfigReader | undefined): ConfigReader {
    return by ? new ConfigReader({ ...this.json, ...by.json }, by.file) : this;
  }

  /** An error that says what is wrong with a value that was read. */
  refuse(problem: string, hint: string): UserError {
    return new UserError("unsupported_model", `${this.file}: ${problem}`, hint);
  }

  #isNull(key: string): boolean {
    return Object.hasOwn(this.json, key) && this.json[key] === null;
  }

  #read<T>(key: string, fallback: T | undefined, expected: string, fits: (value: unknown) => boolean): T {
    const value = Object.hasOwn(this.json, key) ? this.json[key] : fallback;
    if (value === undefined) {
      throw new UserError("bad_model", `${this.file} has no "${key}"`, "use the config.json that belongs to the model");
    }
    if (!fits(value)) {
      throw new UserError(
        "bad_model",
        `${this.file}: "${key}" is ${quote(value)}, and it must be ${expected}`,
        "use the config.json that belongs to the model",
      );
    }
    return value as T;
  }
}
