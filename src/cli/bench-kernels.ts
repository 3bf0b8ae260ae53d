import { inDigits } from "../base/digits.ts";
import { UserError } from "../base/errors.ts";
import {
  type BenchShape,
  COPIES_BYTES,
  GPT2_SHAPES,
  type KernelBenchmark,
  type KernelTiming,
  ROUND_SECONDS,
  shapeOf,
} from "../server/bench-kernels.ts";
import { wordList } from "./flags.ts";

/** `--shapes 768x768,3072x768`: outputs and columns of weights. */
export function shapesOf(text: string | undefined): readonly BenchShape[] {
  if (text === undefined) return GPT2_SHAPES;
  const shapes = wordList(text).map((word) => {
    const [, outputs, columns] = /^([1-9]\d{0,5})x([1-9]\d{0,4})$/.exec(word) ?? [];
    if (outputs !== undefined && columns !== undefined) return shapeOf(Number(outputs), Number(columns));
    throw new UserError("bad_usage", `--shapes ${word} is not a shape`, "give outputs x columns, as --shapes 768x768");
  });
  if (shapes.length > 0) return shapes;
  throw new UserError("bad_usage", "--shapes is empty", "give outputs x columns, as --shapes 768x768");
}

const METHOD = [
  `each round: as many dispatches as take about ${ROUND_SECONDS * 1000} ms, from the submit until the device is done`,
  "(onSubmittedWorkDone; no timestamp queries), over their number; the encodings take turns within a round;",
  `weights lie on the device in copies of ${COPIES_BYTES / 2 ** 20} MiB together, used one after another; medians of the rounds`,
];

/** `time`: over that of bfloat16 in the same round. GB/s: of the encoding's own bytes, codes and scales. */
export function describeKernels({ device, driver, timings }: KernelBenchmark, runs: number): string {
  const head = [
    ["device", `${device}, ${driver}`],
    ["method", `${runs} rounds after those that do not count;`],
    ...METHOD.map((line) => ["", line]),
  ].map(([name, value]) => `${name!.padEnd(8)} ${value}`);
  const columns = ["kernel", "rows", "shape", "weights", "ms", "GB/s", "GFLOP/s", "time"];
  return [...head, "", line(columns), ...timings.map((timing) => line(cellsOf(timing)))].join("\n");
}

function cellsOf(timing: KernelTiming): string[] {
  const { kernel, rows, outputs, columns, encoding, seconds, timeToBf16 } = timing;
  return [
    kernel,
    `${rows}`,
    `${outputs}x${columns}`,
    encoding === "bf16" ? "bfloat16" : encoding,
    inDigits(seconds * 1000, 3),
    inDigits(timing.gigabytesPerSecond, 3),
    inDigits(timing.gigaflopsPerSecond, 3),
    timeToBf16 === null ? "" : `${timeToBf16.toFixed(2)} x`,
  ];
}

const WIDTHS = [7, 5, 10, 9, 9, 8, 8, 0];
const line = (cells: readonly string[]): string =>
  cells
    .map((cell, at) => cell.padEnd(WIDTHS[at]!))
    .join(" ")
    .trimEnd();
