import { readFileSync, statSync } from "node:fs";
import { networkInterfaces } from "node:os";
import { join } from "node:path";
import { formatBytes } from "../base/bytes.ts";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { formatSpan, isHead, isTail, type Span } from "../base/span.ts";
import { numericsId } from "../engine/numerics.ts";
import { type GpuStage, openStage } from "../engine/stage.ts";
import { type Device, openDevice } from "../gpu/device.ts";
import { modelDigest } from "../hub/digest.ts";
import type { Transfer } from "../hub/fetch-ranges.ts";
import { type DownloadProgress, silentProgress } from "../hub/progress.ts";
import type { Environment } from "../hub/settings.ts";
import { resolveModel, smallFiles, type Snapshot } from "../hub/snapshot.ts";
import { Admission } from "../mesh/admission.ts";
import { NextNode, parseNodeUrl } from "../mesh/next-node.ts";
import {
  type Family,
  type ModelConfig,
  readModel,
  readQuantization,
  type StageOptions,
  type StoredQuantization,
} from "../models/index.ts";
import { openCheckpoint } from "../safetensors/checkpoint.ts";
import { loadTokenizer } from "../tokenizer/tokenizer.ts";
import { type LoadPlan, neededNames, planLoad, unexpectedNames } from "../weights/plan.ts";
import { createApp } from "./app.ts";
import { isLoopback } from "./guard.ts";
import { fetchHeaders, type FetchPlan, fetchWeights, fetchWhole, planFetch, weightFiles } from "./fetch.ts";
import { checkPort, serve } from "./serve.ts";

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
  readonly device: string;
  /** Default: what the checkpoint is, which for ordinary ones is bfloat16. */
  readonly quantization?: Quantization;
  /** Exact LLM.int8(): activations in INT8 too. */
  readonly int8Activations?: boolean;
  /** Tokens; default and most: the model's own limit. */
  readonly maxContext?: number;
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
  readonly load: LoadPlan;
  readonly fetch: FetchPlan;
}

export interface RunningNode {
  readonly url: string;
  /** Rejects when the node cannot go on: it does not fit its next node, or its device is lost. */
  readonly failure: Promise<never>;
  /** Finishes what runs, then frees everything. */
  stop(): Promise<void>;
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
  const options = { span, maxContext: contextOf(config, model), encoding, int8Activations };

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
    load,
    fetch: planFetch(snapshot, load),
  };
}

/** Loads the span and serves it. Resolves when the node listens; it is ready once its next node is. */
export async function startNode(config: NodeConfig, surroundings: Surroundings): Promise<RunningNode> {
  const { log, env, progress = silentProgress } = surroundings;
  // What can be wrong is found before minutes of loading, not after.
  checkPort(config);
  if (config.next !== undefined) parseNodeUrl(config.next);
  const plan = await planNode(config, surroundings);
  const { load, snapshot } = plan;
  const { span } = load.options;
  if (config.next !== undefined && isTail(span)) {
    throw new UserError(
      "bad_usage",
      `--next ${config.next} follows the layers ${formatSpan(span)}, and the model ends with them`,
      "leave --next away, or give this node fewer layers (--shard-end)",
    );
  }
  if (!isLoopback(config.host)) {
    log.warn("open to the network", {
      host: config.host,
      why: "whoever reaches this port can use the node: there is no key",
    });
  }
  log.info("plan", {
    layers: `${formatSpan(span)} of ${span.total}`,
    role: isHead(span) && isTail(span) ? "head and tail" : isHead(span) ? "head" : isTail(span) ? "tail" : "middle",
    read: formatBytes(load.readBytes),
    device: formatBytes(load.deviceBytes),
    context: load.options.maxContext,
  });
  const tokenizer = isHead(span) ? await loadTokenizer(snapshot.directory) : undefined;
  await fetchWeights(snapshot, plan.fetch, progress);
  const digest = await modelDigest(snapshot, env);

  const failure = Promise.withResolvers<never>();
  failure.promise.catch(() => {}); // whoever runs the node looks at it
  const device = await openDevice({
    select: config.device,
    log,
    wanted: { bufferBytes: load.largestBytes, bindingBytes: load.largestBytes },
    onLost: (message) => failure.reject(deviceLost(device, message)),
  });
  const stage = await loadStage(plan, device, log);

  const { hiddenSize, vocabSize } = stage.info;
  const own = { model: digest, end: span.end, hiddenSize, vocabSize };
  const next =
    config.next === undefined ? undefined : new Admission({ next: new NextNode({ url: config.next, own }), log });
  const identity = {
    node: crypto.randomUUID(),
    modelId: snapshot.modelId,
    revision: snapshot.revision === "local" ? null : snapshot.revision,
    modelDigest: digest,
    quantization: plan.quantization,
    numerics: numericsId(device, config.int8Activations ? "llm.int8()" : plan.quantization),
    device: device.info.name,
  };
  const memory = () => ({ planned: load.deviceBytes, allocated: stage.allocatedBytes, available: null });
  const allowed = { hosts: [...ownNames(config.host), ...config.allowedHosts], origins: config.allowedOrigins };
  const server = serve(createApp({ stage, tokenizer, identity, next, log, memory, allowed }), {
    hostname: config.host,
    port: config.port,
  });
  next?.start().catch(failure.reject);
  log.info("listening", { url: server.url, layers: formatSpan(span), model: snapshot.modelId });

  return {
    url: server.url,
    failure: failure.promise,
    async stop() {
      next?.stop();
      await server.stop();
      stage.destroy();
      device.destroy();
      snapshot[Symbol.dispose]();
    },
  };
}

async function loadStage(plan: NodePlan, device: Device, log: Logger): Promise<GpuStage> {
  const began = performance.now();
  let said = began;
  const stage = await openStage({
    ...plan,
    plan: plan.load,
    device,
    onProgress: (bytes, total) => {
      if (performance.now() - said < PROGRESS_MS) return;
      said = performance.now();
      log.info("loading", { read: formatBytes(bytes), of: formatBytes(total) });
    },
  });
  const loaded = performance.now();
  log.info("warming up", { why: "a driver may compile the kernels now, once" });
  await stage.warmUp();
  log.info("loaded", {
    seconds: ((loaded - began) / 1000).toFixed(1),
    warmUpSeconds: ((performance.now() - loaded) / 1000).toFixed(1),
    device: formatBytes(stage.allocatedBytes),
  });
  return stage;
}

const PROGRESS_MS = 2_000;

/** `--quantization`, and how the weights that it means lie on the device. */
const ENCODINGS = { bfloat16: "bf16", int8: "int8", nf4: "nf4" } as const;
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

/** Under which names the node may be called: one that listens on every address has all of this machine's. */
function ownNames(host: string): string[] {
  if (host !== "0.0.0.0" && host !== "::") return [host];
  return Object.values(networkInterfaces()).flatMap((addresses = []) => addresses.map(({ address }) => address));
}

function spanOf({ shardStart: start, shardEnd }: NodeConfig, { layers: total }: ModelConfig): Span {
  const end = shardEnd ?? total;
  const hint = `this model has ${total} layers: take --shard-start from 0 to ${total - 1} and --shard-end from above it to ${total}`;
  if (end > total) throw new UserError("bad_range", `--shard-end ${end} is beyond the model's ${total} layers`, hint);
  if (start >= end) throw new UserError("bad_range", `--shard-start ${start} is not below --shard-end ${end}`, hint);
  return { start, end, total };
}

function contextOf({ maxContext }: NodeConfig, { maxPositions }: ModelConfig): number {
  if (maxContext === undefined || maxContext <= maxPositions) return maxContext ?? maxPositions;
  throw new UserError(
    "bad_usage",
    `--max-context ${maxContext} is more than the model's ${maxPositions} positions`,
    `take ${maxPositions} or fewer`,
  );
}

function readJson({ directory }: Snapshot, name: string): Record<string, unknown> {
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

/** generation_config.json has the word, else config.json; one id or several. */
function eosTokenIds(snapshot: Snapshot, config: Record<string, unknown>): number[] {
  const hasOwn = snapshot.files.some((file) => file.name === "generation_config.json");
  const generation = hasOwn ? readJson(snapshot, "generation_config.json") : {};
  const value = generation["eos_token_id"] ?? config["eos_token_id"];
  return [value].flat().filter((id): id is number => Number.isSafeInteger(id));
}

const deviceLost = (device: Device, message: string): UserError =>
  new UserError(
    "device_lost",
    `the device ${device.info.name} is lost: ${message}`,
    "start the node again; if it happens again, look at the driver's log",
  );
