import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import { Commands } from "../gpu/commands.ts";
import type { Device } from "../gpu/device.ts";
import { PipelineCache } from "../gpu/kernel.ts";
import { strideOf, TensorStore } from "../gpu/tensor.ts";
import { argmax, gatherRows, packBf16, unpackBf16, WORKGROUP } from "../kernels/index.ts";
import type { Family, ModelConfig } from "../models/index.ts";
import { loadWeights } from "../weights/load.ts";
import { largestRead, memoryPlan } from "../weights/memory-plan.ts";
import type { LoadPlan } from "../weights/plan.ts";
import { proveRoom } from "./prove-room.ts";
import { GpuStage } from "./stage.ts";

export interface StageSource {
  readonly device: Device;
  readonly family: Family;
  readonly config: ModelConfig;
  readonly plan: LoadPlan;
  readonly eosTokenIds: readonly number[];
  /** Splits weights as if the device bound no more than this. */
  readonly maxBindingBytes?: number;
  readonly onProgress?: (readBytes: number, totalBytes: number) => void;
}

/**
 * Puts a span on the device as its plan says.
 * @throws UserError `does_not_fit` when the device refuses the memory, `bad_model` when a file changed meanwhile.
 */
export async function openStage(source: StageSource): Promise<GpuStage> {
  const { device, plan } = source;
  checkBindings(plan, device.maxBindingBytes);
  await checkRoom(source);
  const store = new TensorStore(device);
  let commands: Commands | undefined;
  device.gpu.pushErrorScope("validation"); // for what is done with a buffer that was refused
  device.gpu.pushErrorScope("out-of-memory");
  const [loaded] = await Promise.allSettled([
    Promise.try(() => load(source, store, (commands = new Commands(device)))),
  ]);
  const refused = await device.gpu.popErrorScope();
  const invalid = await device.gpu.popErrorScope();
  if (loaded.status === "fulfilled" && !refused && !invalid) return loaded.value;

  store.destroyAll();
  commands?.destroy();
  await device.reclaim();
  if (refused) throw refusedError(source, refused.message);
  throw loaded.status === "rejected" ? loaded.reason : new Error(`${device.info.name}: ${invalid!.message}`);
}

/** Before anything is read, all of it is taken once: see `proveRoom`. */
async function checkRoom(source: StageSource): Promise<void> {
  const { grantedBytes, refusal } = await proveRoom(source.device, source.plan, source.maxBindingBytes);
  if (refusal !== undefined) throw refusedError(source, refusal, { granted: grantedBytes });
}

function refusedError({ device, plan }: StageSource, refusal: string, details?: { granted: number }): UserError {
  return new UserError(
    "does_not_fit",
    `layers ${formatSpan(plan.options.span)} need ${formatBytes(memoryPlan(plan).peakBytes)}, and ${device.info.name} refused: ${refusal}`,
    "take fewer layers (--shard-end) or a shorter context (--max-context)",
    { details },
  );
}

async function load(source: StageSource, store: TensorStore, commands: Commands): Promise<GpuStage> {
  const { device, plan, family, config } = source;
  commands.reserveReadback(largestRead(plan));
  const pipelines = PipelineCache.of(device);
  const buffers = new Map(plan.buffers.map((b) => [b.label, store.create(b.label, b.rows, b.columns, b.type)]));
  const upload = buffers.get("upload")!;
  const maxBindingBytes = source.maxBindingBytes ?? device.maxBindingBytes;
  const weights = await loadWeights(plan, { ...source, store, commands, pipelines, upload, maxBindingBytes });
  const model = await family.build(config, plan.options, {
    device,
    pipelines,
    weights,
    fill: (label, firstRow, bytes) => {
      const buffer = buffers.get(label)!;
      store.write(buffer, bytes, firstRow * buffer.rowBytes);
    },
    nothing: buffers.get("nothing")!,
  });
  return new GpuStage(source, model, await edgePipelines(pipelines, config), store, commands, buffers);
}

/** Weights are split where they must be; activations are not. */
function checkBindings({ buffers, options }: LoadPlan, maxBindingBytes: number): void {
  const tooLarge = buffers.find(({ deviceBytes }) => deviceBytes > maxBindingBytes);
  if (!tooLarge) return;
  throw new UserError(
    "does_not_fit",
    `a context of ${options.maxContext} tokens needs ${formatBytes(tooLarge.deviceBytes)} in one piece (${tooLarge.label}), and this device binds at most ${formatBytes(maxBindingBytes)}`,
    "take a shorter context (--max-context)",
  );
}

export type EdgePipelines = Awaited<ReturnType<typeof edgePipelines>>;

/** How activations enter and leave the device. */
async function edgePipelines(pipelines: PipelineCache, { hiddenSize, vocabSize }: ModelConfig) {
  const hidden = { COLUMNS: hiddenSize, STRIDE: strideOf(hiddenSize, "f32"), WORKGROUP };
  const logits = { COLUMNS: vocabSize, STRIDE: strideOf(vocabSize, "f32"), WORKGROUP };
  return {
    unpackHidden: await pipelines.compile(unpackBf16, hidden),
    packHidden: await pipelines.compile(packBf16, hidden),
    packLogits: await pipelines.compile(packBf16, logits),
    argmax: await pipelines.compile(argmax, { ...logits, WORKGROUP: 128 }),
    gather: await pipelines.compile(gatherRows, { STRIDE: hidden.STRIDE, WORKGROUP }),
  };
}
