import { statSync } from "node:fs";
import { basename } from "node:path";
import { messageOf, UserError } from "../../base/errors.ts";
import { bf16ArrayToF32 } from "../../quant/bf16.ts";
import type { CheckpointFile } from "../../safetensors/checkpoint.ts";
import { readHeader, type TensorEntry } from "../../safetensors/header.ts";
import { RangeReader } from "../../safetensors/range-reader.ts";
import type { Expected } from "./noise-gate.ts";

/** What a reference must fit to. */
export interface ReferenceFacts {
  readonly layers: number;
  readonly hiddenSize: number;
  readonly vocabSize: number;
  readonly maxPositions: number;
}

export interface ReferencePrompt {
  readonly name: string;
  readonly ids: Int32Array;
}

/** The two runs that are read, by their names in the file. */
const RUNS = { float32: "fp32", bfloat16: "bf16_eager" } as const;

/** What rounding to bfloat16 costs a model is some hundredths. Runs that are further apart are not of the same weights. */
const MOST_NOISE = 0.3;

const NORM = "norm";
const LOGITS = "logits";

/**
 * What transformers computed for some prompts, as docs/make_reference.py writes it: for a prompt of S tokens
 * `<prompt>.input_ids` I32 [S], and for the runs `fp32` and `bf16_eager` `<prompt>.<run>.hidden.<i>` [S, hidden], which
 * enters layer i, for 1 ≤ i < layers, `<prompt>.<run>.norm` [S, hidden] and `<prompt>.<run>.logits` [S, vocabulary].
 * Tensors of other names are passed over.
 */
export class Reference implements Disposable {
  readonly #reader = new RangeReader();
  readonly #file: CheckpointFile;
  readonly prompts: readonly ReferencePrompt[];

  /** @throws UserError `bad_usage`, which says what does not fit. */
  constructor(
    readonly path: string,
    private readonly facts: ReferenceFacts,
  ) {
    this.#file = { path, name: basename(path), size: sizeOf(path) };
    const entries = headerOf(path);
    const find = (name: string): TensorEntry => {
      const entry = entries.get(name);
      if (entry) return entry;
      throw this.#unfit(`holds no ${name}`);
    };
    this.#find = find;
    const names = [...entries.keys()].filter((name) => name.endsWith(".input_ids")).map((name) => name.slice(0, -10));
    this.prompts = names
      .filter((name) => entries.has(`${name}.${RUNS.float32}.${LOGITS}`))
      .map((name) => ({ name, ids: this.#ids(find(`${name}.input_ids`)) }));
    if (this.prompts.length === 0) {
      throw this.#unfit("holds no prompt: no NAME.input_ids with NAME.fp32.logits beside it");
    }
    for (const { name, ids } of this.prompts) this.#check(name, ids);
    if (entries.has(`${this.prompts[0]!.name}.${RUNS.float32}.hidden.${facts.layers + 1}`)) {
      throw this.#unfit(`is of a model with more than ${facts.layers} layers`);
    }
  }

  readonly #find: (name: string) => TensorEntry;

  /** After layer `layer` ([S, hidden]; after the last one, behind the final norm), or the logits ([S, vocabulary]). */
  expected(prompt: string, layer: number | "logits"): Expected {
    const what = whatOf(layer, this.facts.layers);
    const [float32, bfloat16] = [RUNS.float32, RUNS.bfloat16].map((run) => this.#floats(`${prompt}.${run}.${what}`));
    if (float32!.every((value, i) => value === bfloat16![i])) {
      throw this.#unfit(`has the same values in ${prompt}.fp32.${what} and .bf16_eager: there is no noise to judge by`);
    }
    const noise = relativeDistance(bfloat16!, float32!);
    if (noise > MOST_NOISE) {
      throw this.#unfit(
        `has runs that are not of one model: ${prompt}.bf16_eager.${what} is ${percent(noise)} off ${prompt}.fp32.${what} (rms), and rounding costs ${percent(MOST_NOISE)} at most`,
      );
    }
    return { float32: float32!, bfloat16: bfloat16! };
  }

  [Symbol.dispose](): void {
    this.#reader[Symbol.dispose]();
  }

  #check(prompt: string, ids: Int32Array): void {
    const { layers, hiddenSize, vocabSize, maxPositions } = this.facts;
    const tokens = ids.length;
    if (tokens > maxPositions)
      throw this.#unfit(`has a prompt of ${tokens} tokens, ${prompt}: the model ends at ${maxPositions}`);
    const odd = ids.find((id) => id < 0 || id >= vocabSize);
    if (odd !== undefined) throw this.#unfit(`has token ${odd} in ${prompt}, and the model has ${vocabSize}`);
    for (const run of Object.values(RUNS)) {
      for (let layer = 0; layer < layers; layer++) {
        this.#checkShape(`${prompt}.${run}.${whatOf(layer, layers)}`, [tokens, hiddenSize]);
      }
      this.#checkShape(`${prompt}.${run}.${LOGITS}`, [tokens, vocabSize]);
    }
  }

  #checkShape(name: string, expected: readonly number[]): void {
    const { dtype, shape } = this.#find(name);
    if (dtype !== "F32" && dtype !== "BF16") throw this.#unfit(`has ${name} in ${dtype}, not in F32 or BF16`);
    if (`${shape}` === `${expected}`) return;
    throw this.#unfit(`has ${name} as [${shape.join(", ")}], and the model makes it [${expected.join(", ")}]`);
  }

  #ids(entry: TensorEntry): Int32Array {
    if (entry.dtype !== "I32" || entry.shape.length !== 1 || entry.shape[0] === 0) {
      throw this.#unfit(`has ${entry.name} as ${entry.dtype} [${entry.shape.join(", ")}], not as I32 [tokens]`);
    }
    return new Int32Array(this.#bytes(entry).buffer);
  }

  #floats(name: string): Float32Array {
    const entry = this.#find(name);
    const { buffer } = this.#bytes(entry);
    const values = entry.dtype === "BF16" ? bf16ArrayToF32(new Uint16Array(buffer)) : new Float32Array(buffer);
    const at = values.findIndex((value) => !Number.isFinite(value));
    if (at >= 0) throw this.#unfit(`holds ${values[at]} in ${name}, at element ${at}`);
    return values;
  }

  #bytes({ begin, end }: TensorEntry): Uint8Array<ArrayBuffer> {
    const bytes = new Uint8Array(end - begin);
    this.#reader.read(this.#file, begin, bytes);
    return bytes;
  }

  #unfit(problem: string): UserError {
    return unfit(`${this.path} ${problem}`);
  }
}

/** The rms distance over the rms of `from`. */
function relativeDistance(values: Float32Array, from: Float32Array): number {
  let [distance, size] = [0, 0];
  for (let i = 0; i < from.length; i++) {
    distance += (values[i]! - from[i]!) ** 2;
    size += from[i]! ** 2;
  }
  return Math.sqrt(distance / size);
}

const percent = (share: number): string => `${Math.round(100 * Math.min(share, 10))} %`;

const whatOf = (layer: number | "logits", layers: number): string =>
  layer === "logits" ? LOGITS : layer === layers - 1 ? NORM : `hidden.${layer + 1}`;

function sizeOf(path: string): number {
  try {
    return statSync(path).size;
  } catch (cause) {
    throw unfit(`${path} cannot be read: ${messageOf(cause)}`, cause);
  }
}

function headerOf(path: string): Map<string, TensorEntry> {
  try {
    return readHeader(path);
  } catch (cause) {
    if (!(cause instanceof UserError)) throw cause;
    throw unfit(`${path} is not a SafeTensors file that can be read: ${cause.message}`, cause);
  }
}

const unfit = (message: string, cause?: unknown): UserError =>
  new UserError(
    "bad_usage",
    `--reference: ${message}`,
    "make one of this model with docs/make_reference.py: docs/verify.md says how",
    { cause },
  );
