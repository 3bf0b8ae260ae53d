import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import type { Span } from "../base/span.ts";
import type { Transfer } from "../hub/fetch-ranges.ts";
import { type DownloadProgress, silentProgress } from "../hub/progress.ts";
import type { Environment } from "../hub/settings.ts";
import { resolveModel, smallFiles, type Snapshot } from "../hub/snapshot.ts";
import { generationDefaults } from "../models/generation-config.ts";
import {
  type Family,
  type ModelConfig,
  readModel,
  readQuantization,
  type StageOptions,
  type StoredQuantization,
} from "../models/index.ts";
import { type Checkpoint, openCheckpoint } from "../safetensors/checkpoint.ts";
export { MAX_ROWS } from "../weights/plan.ts";
import { type LoadPlan, neededNames, planLoad, unexpectedNames } from "../weights/plan.ts";
import { fetchHeaders, type FetchPlan, fetchWhole, planFetch, weightFiles } from "./fetch.ts";

export interface NodeConfig {
  /** A directory or a Hub id. */
  readonly modelId: string;
  readonly revision?: string;
  readonly shardStart: number;
  /** Default: the model's last layer. */
  readonly shardEnd?: number;
  /** URL of the node with the next layers. */
  readonly next?: string;
  readonly host: string;
  readonly port: number;
  /** Hosts by which the node may be called besides loopback and `host`. */
  readonly allowedHosts: readonly string[];
  readonly allowedOrigins: readonly string[];
  /** Whether a head has a page to try it; default: no. */
  readonly ui?: boolean;
  readonly device: string;
  /** The most bytes that the node may take of the device; default: what there is. */
  readonly memoryLimit?: number;
  /** Default: what the checkpoint is, which for ordinary ones is bfloat16. */
  readonly quantization?: Quantization;
  /** Exact LLM.int8(): activations in INT8 too. */
  readonly int8Activations?: boolean;
  /** Tokens; at most the model's own limit. Default: that, or DEFAULT_CONTEXT or the model's `contextEdge` where it is more. */
  readonly maxContext?: number;
  /** Sequences of that length to keep room for; default DEFAULT_SESSIONS. */
  readonly maxSessions?: number;
  readonly offline: boolean;
  readonly cacheDir?: string;
  /** Fetch files of weights whole, into the cache that all Hugging Face tools share. */
  readonly wholeFiles?: boolean;
}

export interface Surroundings {
  readonly log: Logger;
  readonly env: Environment;
  readonly progress?: DownloadProgress;
  readonly transfer?: Partial<Transfer>;
}

/** What a node will do, known before a device is opened. */
export interface NodePlan {
  readonly snapshot: Snapshot;
  readonly family: Family;
  readonly config: ModelConfig;
  readonly eosTokenIds: readonly number[];
  readonly quantization: Quantization | StoredQuantization;
  /** The headers of the files that hold the span: what another plan of it can be made from. */
  readonly checkpoint: Checkpoint;
  readonly load: LoadPlan;
  readonly fetch: FetchPlan;
}

/**
 * Finds the model, reads what little tells its shapes, and decides what goes where. No weights are fetched, unless whole
 * files are wanted.
 */
export async function planNode(config: NodeConfig, surroundings: Surroundings): Promise<NodePlan> {
  const { log, env, transfer, progress = silentProgress } = surroundings;
  const snapshot = await resolveModel({ ...config, env, log, transfer });
  await snapshot.fetch(smallFiles(snapshot));
  const json = readJson(snapshot, "config.json");
  const { family, config: model } = readModel(json);
  const span = spanOf(config, model);
  const { quantization, encoding } = quantizationOf(config, readQuantization(json));
  const { int8Activations } = config;
  const maxSessions = config.maxSessions ?? DEFAULT_SESSIONS;
  const options = { span, maxContext: contextOf(config, model), maxSessions, encoding, int8Activations };

  const names = neededNames(family, model, options);
  const needs = (name: string) => names.has(name);
  const pathOf = (name: string) => snapshot.pathOf(name);
  const files = weightFiles(snapshot, needs);
  if (config.wholeFiles) await fetchWhole(snapshot, files, progress);
  else await fetchHeaders(snapshot, files);
  const checkpoint = openCheckpoint(snapshot.directory, { needs, pathOf });
  const load = planLoad(family, model, options, checkpoint);
  const unexpected = unexpectedNames(family, model, options, checkpoint);
  if (unexpected.length > 0) log.warn("unused tensors", { count: unexpected.length, first: unexpected[0] });
  return {
    snapshot,
    family,
    config: model,
    eosTokenIds: eosTokenIds(snapshot, json),
    quantization,
    checkpoint,
    load,
    fetch: planFetch(snapshot, load),
  };
}

/** `--quantization`, and how the weights that it means lie on the device. */
export const ENCODINGS = { bfloat16: "bf16", int8: "int8", nf4: "nf4" } as const;
export type Quantization = keyof typeof ENCODINGS;
export const QUANTIZATIONS = Object.keys(ENCODINGS) as Quantization[];

/** What the weights are to the user, and how those are loaded that the checkpoint does not have quantized. */
function quantizationOf(
  { quantization: wanted, int8Activations }: NodeConfig,
  stored: StoredQuantization | undefined,
): Pick<NodePlan, "quantization"> & Pick<StageOptions, "encoding"> {
  if (stored && wanted && wanted !== stored) {
    throw new UserError(
      "bad_usage",
      `--quantization ${wanted}, and this checkpoint is quantized already, as ${stored}`,
      "leave --quantization away, or use the checkpoint that it was made of",
    );
  }
  const quantization = stored ?? wanted ?? "bfloat16";
  if (int8Activations && quantization !== "int8") {
    const hint = "give --quantization int8 as well, or leave --int8-activations away";
    throw new UserError("bad_usage", `--int8-activations are for int8 weights, and these are ${quantization}`, hint);
  }
  return { quantization, encoding: ENCODINGS[stored ? "bfloat16" : (wanted ?? "bfloat16")] };
}

function spanOf({ shardStart: start, shardEnd }: NodeConfig, { layers: total }: ModelConfig): Span {
  const end = shardEnd ?? total;
  const hint = `this model has ${total} layers: take --shard-start from 0 to ${total - 1} and --shard-end from above it to ${total}`;
  if (end > total) throw new UserError("bad_range", `--shard-end ${end} is beyond the model's ${total} layers`, hint);
  if (start >= end) throw new UserError("bad_range", `--shard-start ${start} is not below --shard-end ${end}`, hint);
  return { start, end, total };
}

/** Models that know 128 Ki positions would reserve tens of gigabytes for what few conversations reach. */
export const DEFAULT_CONTEXT = 8192;
export const DEFAULT_SESSIONS = 4;

function contextOf({ maxContext }: NodeConfig, { maxPositions, contextEdge = maxPositions }: ModelConfig): number {
  // Up to its edge the model is what it was trained to be.
  if (maxContext === undefined) return Math.min(maxPositions, contextEdge, DEFAULT_CONTEXT);
  if (maxContext <= maxPositions) return maxContext;
  throw new UserError(
    "bad_usage",
    `--max-context ${maxContext} is more than the model's ${maxPositions} positions`,
    `take ${maxPositions} or fewer`,
  );
}

/** A JSON object beside the weights. Throws UserError `bad_model`. */
export function readJson({ directory }: Snapshot, name: string): Record<string, unknown> {
  const path = join(directory, name);
  const hint = "give the directory of a model in Hugging Face's layout, or its id on the Hub";
  let text: string;
  try {
    if (!statSync(path).isFile()) throw new Error("it is not a file");
    text = readFileSync(path, "utf8");
  } catch (cause) {
    throw new UserError("bad_model", `${directory} has no ${name} that can be read: ${messageOf(cause)}`, hint, {
      cause,
    });
  }
  try {
    const json: unknown = JSON.parse(text);
    if (typeof json === "object" && json !== null && !Array.isArray(json)) return json as Record<string, unknown>;
  } catch (cause) {
    throw new UserError("bad_model", `${path} is not JSON: ${(cause as Error).message}`, hint, { cause });
  }
  throw new UserError("bad_model", `${path} is not a JSON object`, hint);
}

/** As transformers has it, see `generationDefaults`. */
function eosTokenIds(snapshot: Snapshot, config: Record<string, unknown>): readonly number[] {
  const name = "generation_config.json";
  const generation = snapshot.files.some((file) => file.name === name) ? readJson(snapshot, name) : undefined;
  return generationDefaults(generation, config).eosTokenIds;
}
