import type { ArgsDef } from "citty";
import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import { type DryRun, dryRun } from "../server/dry-run.ts";
import { startNode } from "../server/node.ts";
import {
  DEFAULT_CONTEXT,
  DEFAULT_SESSIONS,
  MAX_ROWS,
  type NodeConfig,
  type NodePlan,
  type Quantization,
  QUANTIZATIONS,
} from "../server/plan-node.ts";
import { defineCommand } from "./command.ts";
import { hubFlags, logFlags, loggerOf, wholeNumber, wordList } from "./flags.ts";
import { megabytes, showDownload, StatusLine } from "./progress.ts";
import { openResults } from "./stdout.ts";
import { byteSize } from "./units.ts";

const flags = {
  "model-id": {
    type: "string",
    required: true,
    valueHint: "ID|DIR",
    description: "A model on the Hugging Face Hub (openai-community/gpt2), or a directory that holds one",
  },
  "shard-start": {
    type: "string",
    default: "0",
    valueHint: "N",
    description: "The first layer; 0 makes this node the head",
  },
  "shard-end": {
    type: "string",
    valueHint: "M",
    description: "The layer after the last one (default: the model's end)",
  },
  next: { type: "string", valueHint: "URL", description: "The node that holds the layers from --shard-end on" },
  host: { type: "string", default: "127.0.0.1", valueHint: "H", description: "The address to listen on" },
  port: { type: "string", default: "8000", valueHint: "P", description: "The port to listen on; 0 takes any free one" },
  "allow-host": {
    type: "string",
    valueHint: "H,…",
    description: "Host names by which this node may be called besides loopback",
  },
  "allow-origin": { type: "string", valueHint: "URL,…", description: "Web pages that may call this node" },
  ui: {
    type: "boolean",
    default: true,
    description: "Have a page to try the model at / of a head",
    negativeDescription: "Have no page at /",
  },
  device: {
    type: "string",
    default: "auto",
    valueHint: "auto|cpu|NAME",
    description: "The adapter: any, a software one, or a part of its name (NAME#1: the second of equal ones)",
  },
  "memory-limit": {
    type: "string",
    valueHint: "SIZE",
    description: "The most that the node may take of the device, as 8GiB or 500MB (default: what there is)",
  },
  quantization: {
    type: "enum",
    options: [...QUANTIZATIONS],
    description: "How the layers' weights are held, as bitsandbytes makes them (default: as the checkpoint has them)",
  },
  "int8-activations": {
    type: "boolean",
    default: false,
    description: "With int8 weights: exact LLM.int8(), whose results depend on what else is in a call",
  },
  "max-context": {
    type: "string",
    valueHint: "T",
    description: `The longest sequence, in tokens (default: the model's own, at most ${DEFAULT_CONTEXT})`,
  },
  "max-sessions": {
    type: "string",
    default: String(DEFAULT_SESSIONS),
    valueHint: "N",
    description: "Sequences of that length to keep room for; shorter ones are more",
  },
  ...hubFlags,
  "whole-files": {
    type: "boolean",
    default: false,
    description: "Fetch weights as whole files into Hugging Face's cache, not only what the layers need",
  },
  quiet: { type: "boolean", default: false, description: "Do not show how far a download is" },
  "dry-run": {
    type: "boolean",
    default: false,
    description: "Print what would be loaded and whether it fits (exit code 3: it does not), and stop",
  },
  ...logFlags,
} satisfies ArgsDef;

/** `meshnet node`: serves a range of a model's layers until it is told to stop. */
export const node = defineCommand({
  name: "node",
  description: "Serve a range of a model's layers",
  args: flags,
  examples: [
    "meshnet node --model-id openai-community/gpt2 --shard-start 0 --shard-end 6 --port 8001 --next http://127.0.0.1:8002",
    "meshnet node --model-id openai-community/gpt2 --shard-start 6 --shard-end 12 --port 8002",
  ],
  async run(args) {
    const config: NodeConfig = {
      modelId: args["model-id"],
      revision: args.revision,
      shardStart: wholeNumber("shard-start", args["shard-start"], 0)!,
      shardEnd: wholeNumber("shard-end", args["shard-end"], 1),
      next: args.next,
      host: args.host,
      port: wholeNumber("port", args.port, 0, 65_535)!,
      allowedHosts: wordList(args["allow-host"]).map(hostName),
      allowedOrigins: wordList(args["allow-origin"]).map(originName),
      ui: args.ui,
      device: args.device,
      memoryLimit: args["memory-limit"] === undefined ? undefined : byteSize("--memory-limit", args["memory-limit"]),
      quantization: args.quantization as Quantization | undefined,
      int8Activations: args["int8-activations"],
      maxContext: wholeNumber("max-context", args["max-context"], 1),
      maxSessions: wholeNumber("max-sessions", args["max-sessions"], 1, MAX_ROWS),
      offline: args.offline,
      cacheDir: args["cache-dir"],
      wholeFiles: args["whole-files"],
    };
    const line = new StatusLine(
      (text) => process.stderr.write(text),
      () => process.stderr.columns || 80,
    );
    const log = loggerOf(args, (text) => line.print(text));
    const format = args["log-format"] as "text" | "json";
    const progress = args.quiet ? undefined : showDownload({ log, format, line: isTerminal() ? line : undefined });
    const surroundings = { log, env: process.env, progress };
    if (args["dry-run"]) {
      const print = openResults();
      const result = await dryRun(config, surroundings);
      await print(describeDryRun(result));
      if (result.refusal) throw result.refusal;
      return 0;
    }
    const stopped = stopSignal();
    const running = await Promise.race([startNode(config, surroundings), stopped]);
    if (running === "stop") {
      line.clear();
      return 0;
    }
    try {
      await Promise.race([stopped, running.failure]);
    } finally {
      surroundings.log.info("stopping");
      await running.stop();
    }
    return 0;
  },
});

/** Whether lines of stderr can be drawn anew. */
const isTerminal = (): boolean => process.stderr.isTTY === true && process.env["TERM"] !== "dumb";

function hostName(text: string): string {
  if (/^[\w.-]+$|^\[?[0-9a-f:.]+\]?$/i.test(text)) return text;
  throw new UserError(
    "bad_usage",
    `--allow-host ${text} is no host name`,
    "give a name or an address, without http:// and port",
  );
}

function originName(text: string): string {
  if (URL.parse(text)?.origin === text) return text;
  throw new UserError(
    "bad_usage",
    `--allow-origin ${text} is no origin`,
    "give scheme and host as a browser does: https://example.org",
  );
}

/** Resolves at SIGTERM or SIGINT; at the second one the process ends at once. */
function stopSignal(): Promise<"stop"> {
  const { promise, resolve } = Promise.withResolvers<"stop">();
  let asked = false;
  for (const signal of ["SIGTERM", "SIGINT"] as const) {
    process.on(signal, () => {
      if (asked) process.exit(1);
      asked = true;
      resolve("stop");
    });
  }
  return promise;
}

function describeDryRun({ plan: { snapshot, config, load, fetch }, memory, verdict }: DryRun): string {
  const { span } = load.options;
  const rows = [
    ["model", `${snapshot.modelId} (${config.modelType}, ${span.total} layers)`],
    ["layers", formatSpan(span)],
    ["files", [...new Set(load.weights.map(({ source }) => source.file.name))].join(", ")],
    ["read", `${formatBytes(load.readBytes)} in ${load.weights.length} tensors`],
    ["fetch", describeFetch(fetch)],
  ];
  return [...rows.map(([name, value]) => `${name!.padEnd(12)} ${value}`), "", ...memory, "", verdict].join("\n");
}

const describeFetch = ({ hereBytes, fetchBytes, checkpointBytes }: NodePlan["fetch"]): string =>
  `${megabytes(fetchBytes)} of a ${megabytes(checkpointBytes)} checkpoint; ${megabytes(hereBytes)} are on this machine`;
