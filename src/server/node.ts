import { networkInterfaces } from "node:os";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { formatSpan, isHead, isTail } from "../base/span.ts";
import { numericsId } from "../engine/numerics.ts";
import { openStage } from "../engine/open-stage.ts";
import type { GpuStage } from "../engine/stage.ts";
import { type Device, openDevice } from "../gpu/device.ts";
import { modelDigest } from "../hub/digest.ts";
import { silentProgress } from "../hub/progress.ts";
import { Admission } from "../mesh/admission.ts";
import { NextNode, parseNodeUrl } from "../mesh/next-node.ts";
import { loadTokenizer } from "../tokenizer/tokenizer.ts";
import { createApp } from "./app.ts";
import { fetchWeights } from "./fetch.ts";
import { isLoopback } from "./guard.ts";
import { type NodeConfig, type NodePlan, planNode, type Surroundings } from "./plan-node.ts";
import { checkPort, serve } from "./serve.ts";

export interface RunningNode {
  readonly url: string;
  /** Rejects when the node cannot go on: it does not fit its next node, or its device is lost. */
  readonly failure: Promise<never>;
  /** Finishes what runs, then frees everything. */
  stop(): Promise<void>;
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

/** Under which names the node may be called: one that listens on every address has all of this machine's. */
function ownNames(host: string): string[] {
  if (host !== "0.0.0.0" && host !== "::") return [host];
  return Object.values(networkInterfaces()).flatMap((addresses = []) => addresses.map(({ address }) => address));
}

const deviceLost = (device: Device, message: string): UserError =>
  new UserError(
    "device_lost",
    `the device ${device.info.name} is lost: ${message}`,
    "start the node again; if it happens again, look at the driver's log",
  );
