// A process of its own that opens a checkpoint and says how that ended and what it took: `bun measure-hostile.ts DIRECTORY`.
import { UserError } from "../../src/base/errors.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { peakMemory } from "./peak-memory.ts";

export interface HostileMeasurement {
  seconds: number;
  peakBytes: number;
  /** The message of the UserError, or how many tensors there are. */
  outcome: string | number;
}

const began = performance.now();
let outcome: HostileMeasurement["outcome"];
try {
  outcome = openCheckpoint(process.argv[2]!, { needs: () => false }).tensors.size;
} catch (error) {
  if (!(error instanceof UserError)) throw error;
  outcome = error.message;
}
const seconds = (performance.now() - began) / 1000;
console.log(JSON.stringify({ seconds, peakBytes: peakMemory(), outcome }));
