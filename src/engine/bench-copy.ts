import type { Device } from "../gpu/device.ts";

const MIB = 2 ** 20;
/** Larger than a CPU's caches, smaller than what any device binds. */
const COPY_BYTES = 64 * MIB;
const ROUNDS = 7;
/** As many copies to a submit as take about this long. */
const ROUND_SECONDS = 0.05;
const MOST_COPIES = 256;

/** Bytes per second from one buffer of the device to another, each byte counted once: the median of the rounds. */
export async function measureCopy({ gpu }: Device): Promise<number> {
  const usage = GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
  const [source, target] = [0, 1].map(() => gpu.createBuffer({ label: "copy", size: COPY_BYTES, usage }));
  try {
    const secondsOf = async (copies: number): Promise<number> => {
      const encoder = gpu.createCommandEncoder();
      for (let i = 0; i < copies; i++) encoder.copyBufferToBuffer(source!, 0, target!, 0, COPY_BYTES);
      const commands = encoder.finish();
      const began = performance.now();
      gpu.queue.submit([commands]);
      await gpu.queue.onSubmittedWorkDone();
      return (performance.now() - began) / 1000 / copies;
    };
    await secondsOf(1); // the first touches the memory
    const copies = Math.min(Math.max(1, Math.ceil(ROUND_SECONDS / (await secondsOf(1)))), MOST_COPIES);
    const rounds: number[] = [];
    for (let round = 0; round < ROUNDS; round++) rounds.push(await secondsOf(copies));
    return COPY_BYTES / rounds.toSorted((a, b) => a - b)[Math.floor(ROUNDS / 2)]!;
  } finally {
    for (const buffer of [source, target]) buffer!.destroy();
  }
}
