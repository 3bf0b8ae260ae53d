import { readFileSync } from "node:fs";
import { join } from "node:path";
import { openStage } from "../../src/engine/open-stage.ts";
import type { GpuStage } from "../../src/engine/stage.ts";
import type { StageInput, Want } from "../../src/engine/types.ts";
import type { Device } from "../../src/gpu/device.ts";
import type { Encoding } from "../../src/nn/index.ts";
import { readModel } from "../../src/models/index.ts";
import { bf16ArrayToF32 } from "../../src/quant/bf16.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { neededNames, planLoad } from "../../src/weights/plan.ts";

export interface StageRange {
  start?: number;
  end?: number;
  maxContext?: number;
  maxSessions?: number;
  passTokens?: number;
  maxBindingBytes?: number;
  encoding?: Encoding;
}

/** What `meshnet node` decides for a span of a fixture before there is a device. */
export function planFixture(directory: string, range: StageRange = {}) {
  const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const span = { start: range.start ?? 0, end: range.end ?? config.layers, total: config.layers };
  const maxContext = range.maxContext ?? Math.min(config.maxPositions, 256);
  const { maxSessions = 4, passTokens, encoding = "bf16" } = range;
  const options = { span, maxContext, maxSessions, passTokens, encoding };
  const names = neededNames(family, config, options);
  const plan = planLoad(family, config, options, openCheckpoint(directory, { needs: (name) => names.has(name) }));
  return { family, config, plan };
}

/** A span of a fixture on a device. */
export async function openFixture(device: Device, directory: string, range: StageRange = {}): Promise<GpuStage> {
  const { maxBindingBytes } = range;
  return openStage({ device, ...planFixture(directory, range), eosTokenIds: [], maxBindingBytes });
}

export const idsInput = (...rows: ArrayLike<number>[]): StageInput => ({
  kind: "ids",
  rows: rows.map((row) => ({ tokens: row.length, positionStart: 0 })),
  ids: Int32Array.from(rows.flatMap((row) => Array.from(row))),
});

/** The bfloat16 values that a stage or a chain of stages gives for these ids. */
export async function bits(stages: readonly GpuStage[], input: StageInput, want: Want): Promise<Uint16Array> {
  let next = input;
  for (const stage of stages.slice(0, -1)) {
    const output = await stage.forward(next, want);
    if (output.kind !== "hidden") throw new Error(`a stage before the tail gave ${output.kind}`);
    next = { kind: "hidden", rows: input.rows, hidden: output.values };
  }
  const output = await stages.at(-1)!.forward(next, want);
  if (!("values" in output)) throw new Error(`the last stage gave ${output.kind}`);
  return output.values;
}

export const floats = async (...args: Parameters<typeof bits>): Promise<Float32Array> =>
  bf16ArrayToF32(await bits(...args));
