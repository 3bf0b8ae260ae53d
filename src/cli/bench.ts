import { existsSync } from "node:fs";
import { join } from "node:path";
import type { ArgsDef } from "citty";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { benchKernels } from "../server/bench-kernels.ts";
import { benchLoad, type LoadBenchmark, type Way } from "../server/bench-load.ts";
import { describeKernels, shapesOf } from "./bench-kernels.ts";
import { runBenchServe, serveFlags } from "./bench-serve.ts";
import { defineCommand } from "./command.ts";
import { logFlags, loggerOf, wholeNumber } from "./flags.ts";
import { headFlags } from "./open-head.ts";
import { openResults } from "./stdout.ts";

const flags = {
  what: { type: "positional", required: true, description: "What is measured: load, kernels or serve" },
  ...headFlags,
  "model-id": {
    type: "string",
    valueHint: "ID|DIR",
    description: "load: a directory that holds a model; serve: also a model on the Hub",
  },
  device: {
    type: "string",
    valueHint: "auto|cpu|NAME",
    description: "The adapter: any, a software one, or a part of its name (default: auto)",
  },
  runs: { type: "string", valueHint: "N", description: "How often each way is timed (default: 7; serve: 3)" },
  shapes: {
    type: "string",
    valueHint: "OUTxIN,…",
    description: "kernels: the shapes of the weights (default: GPT-2's)",
  },
  ...serveFlags,
  json: { type: "boolean", default: false, description: "kernels, serve: print the result as JSON" },
  ...logFlags,
} satisfies ArgsDef;

/**
 * `meshnet bench load`: how fast weights come onto the device, against the least that it could take.
 * `meshnet bench kernels`: how fast they are multiplied there, in each encoding.
 * `meshnet bench serve`: how fast texts are made.
 */
export const bench = defineCommand({
  name: "bench",
  description: "Measure a part of meshnet on this machine",
  args: flags,
  examples: [
    "meshnet bench load --model-id ./gpt2",
    "meshnet bench kernels --device cpu --shapes 768x768",
    "meshnet bench serve --model-id ./gpt2 --sessions 1,4,16",
    "meshnet bench serve --head http://127.0.0.1:8001 --json",
  ],
  async run(args) {
    const given = wholeNumber("runs", args.runs, 1, 1000);
    if (args.what === "serve") return runBenchServe(args, given ?? SERVE_RUNS);
    const runs = given ?? USUAL_RUNS;
    const device = args.device ?? "auto";
    const surroundings = { log: loggerOf(args), env: process.env };
    if (args.what === "kernels") {
      const options = { device, shapes: shapesOf(args.shapes), runs };
      const print = openResults();
      const measured = await benchKernels(options, surroundings);
      await print(args.json ? JSON.stringify({ runs, ...measured }, undefined, 2) : describeKernels(measured, runs));
      return 0;
    }
    if (args.what !== "load") {
      const hint = "known are: meshnet bench load, meshnet bench kernels and meshnet bench serve";
      throw new UserError("bad_usage", `unknown benchmark ${args.what}`, hint);
    }
    const directory = args["model-id"];
    if (directory === undefined)
      throw new UserError("bad_usage", "meshnet bench load needs --model-id", "give a directory that holds a model");
    if (!existsSync(join(directory, "config.json"))) {
      const hint = "loading is measured from files that are whole and on this machine: give their directory";
      throw new UserError("bad_usage", `--model-id ${directory} is not a directory with a config.json`, hint);
    }
    const print = openResults();
    const measured = await benchLoad({ directory, device, runs }, surroundings);
    await print(describe(directory, runs, measured));
    return 0;
  },
});

const USUAL_RUNS = 7;
const SERVE_RUNS = 3;

const WAYS: readonly [way: Way, name: string, method: string][] = [
  ["read", "read", "positioned reads of every tensor into one piece of memory"],
  ["upload", "read, upload", "the same bytes as they are, to a new buffer of the device for each tensor"],
  ["load", "load", "as a node does: read, converted to bfloat16, put on the device, transposed where need be"],
];

function describe(directory: string, runs: number, { device, readBytes, tensors, seconds, hostBytes }: LoadBenchmark) {
  const median = (way: Way) => seconds[way].toSorted((a, b) => a - b)[Math.floor(seconds[way].length / 2)]!;
  const rate = (time: number) => (readBytes / time / 1e9).toFixed(2);
  const times = WAYS.map(([way, name, method]) => {
    const range = `${rate(Math.max(...seconds[way]))}-${rate(Math.min(...seconds[way]))}`;
    return [name, `${rate(median(way))} GB/s (${range})`.padEnd(24) + method];
  });
  const rows = [
    ["model", `${directory}: ${formatBytes(readBytes)} in ${tensors} tensors`],
    ["device", device],
    ["method", `files in the system's cache; ${runs} runs of each way in turn after one that does not count; medians`],
    ...times,
    ["time of load", `${(median("load") / median("upload")).toFixed(2)} × read and upload (goal: at most 1.2)`],
    ["host memory", hostBytes === undefined ? "not told by this system" : `${describeHost(hostBytes)}`],
  ];
  return rows.map(([name, value]) => `${name!.padEnd(14)} ${value}`).join("\n");
}

const describeHost = (bytes: number): string =>
  `${formatBytes(Math.max(0, bytes))} at most above the device's own while loading (goal: below 64 MiB)`;
