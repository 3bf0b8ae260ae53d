import { existsSync } from "node:fs";
import { join } from "node:path";
import { sum } from "../../base/bytes.ts";
import { UserError } from "../../base/errors.ts";
import { openDevice } from "../../gpu/device.ts";
import { silentProgress } from "../../hub/progress.ts";
import type { Snapshot } from "../../hub/snapshot.ts";
import { fetchWeights } from "../fetch.ts";
import { type NodeConfig, type NodePlan, planNode, type Surroundings } from "../plan-node.ts";
import { compareWithBfloat16, valuesOf } from "./against-bfloat16.ts";
import { compareWithReference } from "./against-reference.ts";
import { brokenWeights } from "./broken-weights.ts";
import type { Compared } from "./encodings.ts";
import { Reference } from "./reference-file.ts";
import type { ReferenceVerification, Verification } from "./report.ts";
import { DEFAULT_CONTEXT, readSequences } from "./sequences.ts";
import { Planner, Stages } from "./stages.ts";

export interface VerifyConfig extends Pick<NodeConfig, "modelId" | "revision" | "device" | "offline" | "cacheDir"> {
  readonly compared: readonly Compared[];
  /** A file; default: the one in the model's directory, else a text is read. */
  readonly reference?: string;
  /** A file; default: the built-in text. Not with a reference. */
  readonly text?: string;
  /** Tokens of a sequence; default: 256 or what the model has; with a reference its longest prompt. */
  readonly maxContext?: number;
}

/** A reference that lies beside the weights is used without being named. */
export const STORED_REFERENCE = "reference.safetensors";

/**
 * Runs a model over a reference's prompts, or over a text, in bfloat16 and in each encoding, one stage at a time on the
 * device, and compares: with the reference, or with bfloat16.
 * @throws UserError for what keeps it from running; what it finds is in the result's `problems`.
 */
export async function verify(
  config: VerifyConfig,
  surroundings: Surroundings,
): Promise<Verification | ReferenceVerification> {
  const node = { shardStart: 0, host: "", port: 0, allowedHosts: [], allowedOrigins: [], ...config, text: undefined };
  const whole = await planNode(node, surroundings);
  using snapshot = whole.snapshot;
  if (whole.quantization !== "bfloat16") throw quantizedAlready(snapshot.modelId, whole.quantization);
  const file = referenceOf(config, snapshot);
  if (file !== undefined) return await verifyWithReference(file, config, node, whole, surroundings);
  return await verifyWithText(config, node, whole, surroundings);
}

async function verifyWithText(
  config: VerifyConfig,
  node: NodeConfig,
  whole: NodePlan,
  surroundings: Surroundings,
): Promise<Verification> {
  const { vocabSize, maxPositions, layers } = whole.config;
  const maxContext = config.maxContext ?? Math.min(maxPositions, DEFAULT_CONTEXT);
  const sequences = await readSequences(whole.snapshot.directory, config.text, { maxContext, vocabSize });
  const text = {
    source: config.text ?? "built-in",
    tokens: sum(sequences.map((ids) => ids.length)),
    sequences: sequences.length,
    predicted: sum(sequences.map((ids) => ids.length - 1)),
  };
  surroundings.log.info("verify", { text: text.source, tokens: text.tokens, sequences: sequences.length });
  const cut = layers < 2 ? null : Math.floor(layers / 2);
  return onDevice({ ...node, maxContext }, whole, surroundings, async (stages, broken) => {
    const found =
      broken.length > 0
        ? { encodings: [], problems: broken }
        : await compareWithBfloat16(stages, { sequences, layers, vocabSize, cut }, config.compared);
    return { text, cut, ...found };
  });
}

async function verifyWithReference(
  file: string,
  config: VerifyConfig,
  node: NodeConfig,
  whole: NodePlan,
  surroundings: Surroundings,
): Promise<ReferenceVerification> {
  const { layers, vocabSize } = whole.config;
  using reference = new Reference(file, whole.config);
  const prompts = reference.prompts.map(({ name, ids }) => ({ name, tokens: ids.length }));
  const longest = Math.max(...prompts.map(({ tokens }) => tokens));
  const maxContext = config.maxContext ?? longest;
  if (maxContext < longest) throw contextTooShort(maxContext, longest);
  surroundings.log.info("verify", { reference: file, prompts: prompts.length });
  return onDevice({ ...node, maxContext }, whole, surroundings, async (stages, broken) => {
    const nothing = { layers: [], firstDiverging: null, referenceQuality: null, encodings: [], problems: broken };
    const run = { reference, layers, vocabSize };
    const found = broken.length > 0 ? nothing : await compareWithReference(stages, run, config.compared);
    return { reference: { file, prompts }, ...found };
  });
}

/** Fetches the weights, looks at every one of them, and opens the device for `compare`. */
async function onDevice<T extends { readonly problems: readonly string[] }>(
  node: NodeConfig,
  { snapshot, config, load, fetch }: NodePlan,
  surroundings: Surroundings,
  compare: (stages: Stages, brokenWeights: string[]) => Promise<T>,
) {
  const { log, progress = silentProgress } = surroundings;
  await fetchWeights(snapshot, fetch, progress);
  const planner = new Planner({ ...node, revision: snapshot.revision }, surroundings);
  using plan = await planner.plan("bfloat16", 0, config.layers);
  const { largestBytes } = plan.load;
  const wanted = { bufferBytes: largestBytes, bindingBytes: largestBytes };
  const device = await openDevice({ select: node.device, log, wanted });
  try {
    const found = await compare(new Stages(device, planner, log), brokenWeights(plan.load));
    return {
      schema: 1 as const,
      model: {
        id: snapshot.modelId,
        revision: snapshot.revision,
        type: config.modelType,
        layers: config.layers,
        parameters: sum(load.weights.map(valuesOf)),
      },
      device: { name: device.info.name, driver: device.info.description },
      ...found,
      ok: found.problems.length === 0,
    };
  } finally {
    device.destroy();
  }
}

function referenceOf({ reference, text }: VerifyConfig, { directory }: Snapshot): string | undefined {
  if (reference !== undefined && text !== undefined) {
    throw new UserError(
      "bad_usage",
      "--text and --reference are both given",
      "a reference has its own prompts: give one",
    );
  }
  if (reference !== undefined || text !== undefined) return reference;
  const stored = join(directory, STORED_REFERENCE);
  return existsSync(stored) ? stored : undefined;
}

const contextTooShort = (maxContext: number, longest: number): UserError =>
  new UserError(
    "bad_usage",
    `--max-context ${maxContext} is less than the ${longest} tokens of the reference's longest prompt`,
    "leave it away, or give more",
  );

const quantizedAlready = (modelId: string, quantization: string): UserError =>
  new UserError(
    "unsupported_model",
    `verify compares encodings with bfloat16, and the weights of ${modelId} are quantized already, as ${quantization}`,
    "verify the checkpoint that it was made of",
  );
