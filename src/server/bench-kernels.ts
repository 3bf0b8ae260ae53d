import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import {
  type BenchShape,
  COPIES_BYTES,
  type KernelTiming,
  ROUND_SECONDS,
  timeKernels,
} from "../engine/bench-kernels.ts";
import { openDevice } from "../gpu/device.ts";
import type { Surroundings } from "./plan-node.ts";

export { COPIES_BYTES, ROUND_SECONDS };
export type { BenchShape, KernelTiming };

export interface KernelBenchmark {
  readonly device: string;
  readonly driver: string;
  readonly timings: readonly KernelTiming[];
}

const ALL = ["bf16", "int8", "nf4"] as const;

/** The weights of GPT-2 (124M): of a layer in every encoding, and the head, which is never encoded and has few rows. */
export const GPT2_SHAPES: readonly BenchShape[] = [
  { outputs: 2304, columns: 768, encodings: ALL },
  { outputs: 768, columns: 768, encodings: ALL },
  { outputs: 3072, columns: 768, encodings: ALL },
  { outputs: 768, columns: 3072, encodings: ALL },
  { outputs: 50257, columns: 768, encodings: ["bf16"], rows: [1, 32] },
];

export const shapeOf = (outputs: number, columns: number): BenchShape => ({ outputs, columns, encodings: ALL });

/** Times the kernels that multiply by a weight; `onTiming` hears of each result as it comes. */
export async function benchKernels(
  { device: select, shapes, runs }: { device: string; shapes: readonly BenchShape[]; runs: number },
  { log }: Pick<Surroundings, "log">,
  onTiming?: (timing: KernelTiming) => void,
): Promise<KernelBenchmark> {
  const largest = Math.max(...shapes.map(({ outputs, columns }) => outputs * (columns + 8) * 2));
  const device = await openDevice({ select, log, wanted: { bufferBytes: largest, bindingBytes: largest } });
  try {
    if (largest > device.maxBindingBytes) {
      throw new UserError(
        "does_not_fit",
        `a weight of ${formatBytes(largest)} in bfloat16, and ${device.info.name} binds at most ${formatBytes(device.maxBindingBytes)}`,
        "give smaller --shapes",
      );
    }
    const timings: KernelTiming[] = [];
    for await (const timing of timeKernels(device, shapes, runs)) {
      timings.push(timing);
      onTiming?.(timing);
    }
    return { device: device.info.name, driver: device.info.description, timings };
  } finally {
    device.destroy();
  }
}
