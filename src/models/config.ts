import { UserError } from "../base/errors.ts";

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
}

/** Of whatever a configuration counts but layers: beyond it, products of two would lose digits. */
const MOST = 2 ** 26;
/** Layers are gone through one by one before anything is loaded. The deepest models have some hundreds. */
export const MOST_LAYERS = 20_000;

export type StoredQuantization = "nf4" | "fp4" | "int8";

/**
 * What `quantization_config` says of the checkpoint's weights (transformers, `BitsAndBytesConfig`); undefined where they
 * are ordinary. Which of them are quantized, the tensors themselves say.
 */
export function readQuantization(json: Readonly<Record<string, unknown>>): StoredQuantization | undefined {
  const config = json["quantization_config"];
  if (config === undefined || config === null) return undefined;
  const { quant_method, load_in_4bit, load_in_8bit, bnb_4bit_quant_type = "fp4" } = config as Record<string, unknown>;
  const refuse = (problem: string) =>
    new UserError(
      "unsupported_model",
      `config.json: quantization_config ${problem}`,
      "meshnet reads those of bitsandbytes: int8, nf4 and fp4",
    );
  if (quant_method !== "bitsandbytes") throw refuse(`has the quant_method ${JSON.stringify(quant_method)}`);
  if (load_in_8bit === true) return "int8";
  if (load_in_4bit !== true) throw refuse("says neither load_in_4bit nor load_in_8bit");
  if (bnb_4bit_quant_type === "nf4" || bnb_4bit_quant_type === "fp4") return bnb_4bit_quant_type;
  throw refuse(`has the bnb_4bit_quant_type ${JSON.stringify(bnb_4bit_quant_type)}`);
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
    return this.json[key] === null || this.json[key] === undefined ? undefined : this.count(key);
  }

  #read<T>(key: string, fallback: T | undefined, expected: string, fits: (value: unknown) => boolean): T {
    const value = Object.hasOwn(this.json, key) ? this.json[key] : fallback;
    if (value === undefined) {
      throw new UserError("bad_model", `${this.file} has no "${key}"`, "use the config.json that belongs to the model");
    }
    if (!fits(value)) {
      throw new UserError(
        "bad_model",
        `${this.file}: "${key}" is ${JSON.stringify(value)}, and it must be ${expected}`,
        "use the config.json that belongs to the model",
      );
    }
    return value as T;
  }
}
