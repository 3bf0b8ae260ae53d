import { sum } from "../base/bytes.ts";
import type { DownloadProgress } from "../hub/progress.ts";
import type { FilePart, Snapshot } from "../hub/snapshot.ts";
import { neededFiles, SINGLE_FILE } from "../safetensors/checkpoint.ts";
import { headerEnd } from "../safetensors/header.ts";
import type { LoadPlan } from "../weights/plan.ts";

/** Which bytes of a model's files the weights of a plan are, and how many of them are here already. */
export interface FetchPlan {
  readonly parts: readonly FilePart[];
  readonly hereBytes: number;
  /** With the small gaps that are fetched along. */
  readonly fetchBytes: number;
  /** Of all its weights. */
  readonly checkpointBytes: number;
}

/** The files of weights that hold a needed tensor. An index beside the one file, left by another tool, does not count. */
export function weightFiles(snapshot: Snapshot, needs?: (tensorName: string) => boolean): string[] {
  const isSingle = snapshot.files.some(({ name }) => name === SINGLE_FILE);
  return isSingle ? [SINGLE_FILE] : neededFiles(snapshot.directory, { needs });
}

/** Almost every header is shorter than this (huggingface_hub asks for as much at first). */
const FIRST_BYTES = 100_000;

/** Brings the headers of these files to this machine: their beginning, and of the few that are longer the rest. */
export async function fetchHeaders(snapshot: Snapshot, names: readonly string[]): Promise<void> {
  const sizes = new Map(snapshot.files.map(({ name, size }) => [name, size]));
  const beginning = (name: string, length: number) => ({
    name,
    ranges: [{ begin: 0, end: Math.min(length, sizes.get(name) ?? 0) }],
  });
  await snapshot.ensure(names.map((name) => beginning(name, FIRST_BYTES)));
  const there = names.filter((name) => sizes.has(name)); // what a directory lacks is told when the checkpoint is opened
  await snapshot.ensure(there.map((name) => beginning(name, headerEnd(snapshot.pathOf(name), sizes.get(name)!))));
}

export function planFetch(snapshot: Snapshot, load: LoadPlan): FetchPlan {
  const parts = Map.groupBy(load.sources, ({ file }) => file.name);
  const wanted = [...parts].map(([name, ranges]) => ({ name, ranges }));
  const missing = snapshot.missingBytes(wanted);
  return {
    parts: wanted,
    hereBytes: load.readBytes - missing.wanted,
    fetchBytes: missing.fetch,
    checkpointBytes: checkpointBytes(snapshot),
  };
}

/** Fetches what the plan's weights are. */
export const fetchWeights = (snapshot: Snapshot, plan: FetchPlan, progress: DownloadProgress): Promise<void> =>
  snapshot.ensure(plan.parts, { progress, checkpointBytes: plan.checkpointBytes });

/** Fetches files of weights as they are, for a server that has no ranges or for the other tools on this machine. */
export const fetchWhole = (snapshot: Snapshot, names: readonly string[], progress: DownloadProgress): Promise<void> =>
  snapshot.fetch(names, { progress, checkpointBytes: checkpointBytes(snapshot) });

function checkpointBytes(snapshot: Snapshot): number {
  const all = new Set(weightFiles(snapshot));
  return sum(snapshot.files.filter(({ name }) => all.has(name)).map(({ size }) => size));
}
