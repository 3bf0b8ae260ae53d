import { networkInterfaces } from "node:os";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan, isHead, isTail } from "../base/span.ts";
import { numericsId } from "../engine/numerics.ts";
import type { Device } from "../gpu/device.ts";
import { modelDigest } from "../hub/digest.ts";
import { silentProgress } from "../hub/progress.ts";
import { Admission } from "../mesh/admission.ts";
import { NextNode, parseNodeUrl } from "../mesh/next-node.ts";
import { loadTokenizer } from "../tokenizer/tokenizer.ts";
import { page as pageOfHeads } from "../ui/page.ts";
import { memoryPlan } from "../weights/memory-plan.ts";
import { weightBytesPerToken } from "../weights/plan.ts";
import { createApp } from "./app.ts";
import { fetchWeights } from "./fetch.ts";
import { isLoopback } from "./guard.ts";
import { checkBeforeWholeFiles, memoryMeter } from "./node-device.ts";
import { claimDevice, loadNodeStage } from "./node-stage.ts";
import { loadTextModel } from "./openai/text-model.ts";
import { type NodeConfig, planNode, type Surroundings } from "./plan-node.ts";
import { checkPort, serve } from "./serve.ts";

export interface RunningNode {
  readonly url: string;
  /** Rejects when the node cannot go on: it does not fit its next node, or its device is lost again and again. */
  readonly failure: Promise<never>;
  /** The one that it computes on now: another one after a loss. */
  readonly device: Device;
  /** Finishes what runs, then frees everything. */
  stop(): Promise<void>;
}

/** Loads the span and serves it. Resolves when the node listens; it is ready once its next node is. */
export async function startNode(config: NodeConfig, surroundings: Surroundings): Promise<RunningNode> {
  const { log, env, progress = silentProgress } = surroundings;
  // What can be wrong is found before minutes of loading, not after.
  await checkPort(config);
  if (config.next !== undefined) parseNodeUrl(config.next);
  if (config.wholeFiles) await checkBeforeWholeFiles(config, surroundings);
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
    device: formatBytes(memoryPlan(load).plannedBytes),
    context: load.options.maxContext,
  });
  const failure = Promise.withResolvers<never>();
  failure.promise.catch(() => {}); // whoever runs the node looks at it
  const first = await claimDevice({ plan, config, log });
  const tokenizer = isHead(span) ? await loadTokenizer(snapshot.directory) : undefined;
  const textModel = tokenizer && loadTextModel(snapshot, tokenizer);
  await fetchWeights(snapshot, plan.fetch, progress);
  const digest = await modelDigest(snapshot, env);

  let device = first.device;
  const stage = await loadNodeStage(
    first,
    { plan, config, log },
    { opened: (anew) => (device = anew), giveUp: failure.reject },
  );

  const { hiddenSize, vocabSize } = stage.info;
  const { contextEdge: edge } = plan.config;
  const context = edge === undefined ? undefined : { own: load.options.maxContext, edge };
  const node = crypto.randomUUID();
  const own = { node, model: digest, end: span.end, hiddenSize, vocabSize, context };
  const next =
    config.next === undefined ? undefined : new Admission({ next: new NextNode({ url: config.next, own }), log });
  const identity = {
    node,
    modelId: snapshot.modelId,
    revision: snapshot.revision === "local" ? null : snapshot.revision,
    modelDigest: digest,
    quantization: plan.quantization,
    numerics: numericsId(device, config.int8Activations ? "llm.int8()" : plan.quantization),
    device: device.info.name,
    weightBytesPerToken: weightBytesPerToken(load),
  };
  const memory = memoryMeter(plan, device, stage, config.memoryLimit);
  const allowed = { hosts: [...ownNames(config.host), ...config.allowedHosts], origins: config.allowedOrigins };
  const page = isHead(span) && config.ui ? pageOfHeads : undefined;
  const server = serve(createApp({ stage, tokenizer, textModel, identity, next, log, memory, allowed, page }), {
    hostname: config.host,
    port: config.port,
  });
  next?.start().catch(failure.reject);
  log.info("listening", { url: server.url, layers: formatSpan(span), model: snapshot.modelId });

  return {
    url: server.url,
    failure: failure.promise,
    get device() {
      return device;
    },
    async stop() {
      next?.stop();
      await server.stop();
      // A pass whose callers have all hung up cannot be called back, and a device is not given back before it has ended, which on a
      // CPU may take minutes: it ends with the process.
      if (stage.waiting === 0) stage.destroy();
      snapshot[Symbol.dispose]();
    },
  };
}

/** Under which names the node may be called: one that listens on every address has all of this machine's. */
function ownNames(host: string): string[] {
  if (host !== "0.0.0.0" && host !== "::") return [host];
  return Object.values(networkInterfaces()).flatMap((addresses = []) => addresses.map(({ address }) => address));
}
