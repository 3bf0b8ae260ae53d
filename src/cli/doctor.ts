import { join } from "node:path";
import type { ArgsDef } from "citty";
import { dependencies, version } from "../../package.json" with { type: "json" };
import { ERRORS, UserError } from "../base/errors.ts";
import { peerUrl } from "../mesh/probe.ts";
import { type Check, type DoctorOptions, examine, isWrongUsage, reportOf } from "../server/doctor/index.ts";
import { MAX_ROWS, type Quantization, QUANTIZATIONS } from "../server/plan-node.ts";
import { defineCommand } from "./command.ts";
import { describeCheck, describeVerdict } from "./describe-doctor.ts";
import { hubFlags, logFlags, loggerOf, wholeNumber } from "./flags.ts";
import { openResults } from "./stdout.ts";
import { environmentName } from "./strict.ts";
import { byteSize } from "./units.ts";

const flags = {
  "model-id": {
    type: "string",
    valueHint: "ID|DIR",
    description: "Also say how many layers of this model fit, and how to start the node",
  },
  "shard-start": { type: "string", valueHint: "N", description: "Of the model: the first layer (default: 0)" },
  "shard-end": {
    type: "string",
    valueHint: "M",
    description: "Of the model: the layer after the last one (default: the model's end)",
  },
  quantization: {
    type: "enum",
    options: [...QUANTIZATIONS],
    description: "Of the model: only this encoding (default: each)",
  },
  "max-context": {
    type: "string",
    valueHint: "T",
    description: "Of the model: only this context, in tokens (default: several)",
  },
  "max-sessions": { type: "string", valueHint: "N", description: "Of the model: sequences to keep room for" },
  "memory-limit": {
    type: "string",
    valueHint: "SIZE",
    description: "Of the model: the most that the node may take of the device, as 8GiB or 500MB",
  },
  peer: { type: "string", valueHint: "URL", description: "Also test this node: reachable, model, speed" },
  quick: {
    type: "boolean",
    default: false,
    description: "Skip the measurements, and test 3 kernels of each device, not all (which takes seconds)",
  },
  device: {
    type: "string",
    default: "auto",
    valueHint: "auto|cpu|NAME",
    description: "The adapter that a node would be given",
  },
  host: { type: "string", default: "127.0.0.1", valueHint: "H", description: "The address that a node would have" },
  port: { type: "string", default: "8000", valueHint: "P", description: "The port that a node would have" },
  json: { type: "boolean", default: false, description: "Print the result as JSON (docs/doctor.md)" },
  ...hubFlags,
  ...logFlags,
} satisfies ArgsDef;

/** `meshnet doctor`: what a node needs, what of it is here, and what to do about the rest. */
export const doctor = defineCommand({
  name: "doctor",
  description: "Look at everything that a node needs on this machine, and say what to do",
  args: flags,
  examples: [
    "meshnet doctor",
    "meshnet doctor --model-id openai-community/gpt2 --quantization nf4",
    "meshnet doctor --quick --peer http://192.168.1.20:8002",
  ],
  async run(args) {
    if (args.peer !== undefined) peerUrl(args.peer); // wrong usage, not a thing to find out at the end
    const options: DoctorOptions = {
      versions: { meshnet: version, dawn: dependencies.webgpu, isCompiled: IS_COMPILED },
      self: IS_COMPILED ? [process.execPath] : [process.execPath, join(import.meta.dir, "../index.ts")],
      quick: args.quick,
      device: args.device,
      offline: args.offline,
      cacheDir: args["cache-dir"],
      host: args.host,
      port: wholeNumber("port", args.port, 0, 65_535)!,
      peer: args.peer,
      model: modelQuestion(args),
    };
    const log = loggerOf({ ...args, "log-level": args["log-level"] === "info" ? "error" : args["log-level"] });
    const print = openResults();
    const checks: Check[] = [];
    for await (const check of examine(options, { env: process.env, log })) {
      checks.push(check);
      if (!args.json) await print(describeCheck(check));
    }
    const report = reportOf(checks, options);
    await print(args.json ? JSON.stringify(report, undefined, 2) : describeVerdict(report));
    if (isWrongUsage(report)) return ERRORS.bad_usage.exit;
    return report.ok ? 0 : 1;
  },
});

/** One file that was compiled, whose sources are inside it. */
const IS_COMPILED = import.meta.path.startsWith("/$bunfs/") || /^[A-Z]:[\\/]~BUN/.test(import.meta.path);

/** Without a model these would say nothing. */
const OF_THE_MODEL = [
  "shard-start",
  "shard-end",
  "quantization",
  "max-context",
  "max-sessions",
  "memory-limit",
  "revision",
] as const;

interface ModelArgs {
  "model-id"?: string;
  revision?: string;
  "shard-start"?: string;
  "shard-end"?: string;
  quantization?: string;
  "max-context"?: string;
  "max-sessions"?: string;
  "memory-limit"?: string;
  device: string;
  offline: boolean;
  "cache-dir"?: string;
}

function modelQuestion(args: ModelArgs): DoctorOptions["model"] {
  const modelId = args["model-id"];
  const limit = args["memory-limit"];
  // Looked at even without a model: a wrong number is wrong usage, not a thing to find out later.
  const numbers = {
    shardStart: wholeNumber("shard-start", args["shard-start"] ?? "0", 0)!,
    shardEnd: wholeNumber("shard-end", args["shard-end"], 1),
    maxContext: wholeNumber("max-context", args["max-context"], 1),
    maxSessions: wholeNumber("max-sessions", args["max-sessions"], 1, MAX_ROWS),
    memoryLimit: limit === undefined ? undefined : byteSize("--memory-limit", limit),
  };
  if (modelId === undefined) {
    // What the environment says for a node's sake is no question.
    const isAsked = (name: keyof ModelArgs) => args[name] !== undefined && !process.env[environmentName(name)];
    const given = OF_THE_MODEL.find(isAsked);
    if (given === undefined) return undefined;
    throw new UserError(
      "bad_usage",
      `--${given} is about a model, and there is no --model-id`,
      "give --model-id as well",
    );
  }
  return {
    modelId,
    revision: args.revision,
    quantization: args.quantization as Quantization | undefined,
    device: args.device,
    offline: args.offline,
    cacheDir: args["cache-dir"],
    ...numbers,
  };
}
