// A process of its own that opens a checkpoint and plans some of its layers: `bun measure-open.ts DIRECTORY START END`.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { readModel } from "../../src/models/index.ts";
import { neededFiles, openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { neededNames, planLoad } from "../../src/weights/plan.ts";
import { peakMemory } from "./peak-memory.ts";

export interface OpenMeasurement {
  seconds: number;
  /** The highest resident set of the whole process, in bytes. */
  peakBytes: number;
  /** Shards that were opened, tensors that were kept, tensors that are to be loaded. */
  shards: number;
  kept: number;
  planned: number;
}

const [directory, start, end] = process.argv.slice(2) as [string, string, string];
const began = performance.now();
const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
const span = { start: Number(start), end: Number(end), total: config.layers };
const options = { span, maxContext: config.maxPositions, maxSessions: 1, encoding: "bf16" as const };
const names = neededNames(family, config, options);
const needs = (name: string) => names.has(name);
neededFiles(directory, { needs });
const checkpoint = openCheckpoint(directory, { needs });
const plan = planLoad(family, config, options, checkpoint);
const measurement: OpenMeasurement = {
  seconds: (performance.now() - began) / 1000,
  peakBytes: peakMemory(),
  shards: checkpoint.files.length,
  kept: checkpoint.tensors.size,
  planned: plan.weights.length,
};
console.log(JSON.stringify(measurement));
