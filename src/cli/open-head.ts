import type { ArgsDef, ParsedArgs } from "citty";
import { UserError } from "../base/errors.ts";
import { HeadClient } from "../mesh/head-client.ts";
import { startNode } from "../server/node.ts";
import { type Quantization, QUANTIZATIONS } from "../server/plan-node.ts";
import { hubFlags, logFlags, loggerOf, wholeNumber } from "./flags.ts";
import { showDownload, StatusLine } from "./progress.ts";
import { environmentName } from "./strict.ts";
import { byteSize } from "./units.ts";

/** Flags of a model that this process holds as a whole. */
const modelFlags = {
  quantization: {
    type: "enum",
    options: [...QUANTIZATIONS],
    description: "With --model-id: how the layers' weights are held (default: as the checkpoint has them)",
  },
  device: { type: "string", valueHint: "auto|cpu|NAME", description: "With --model-id: the adapter (default: auto)" },
  "memory-limit": {
    type: "string",
    valueHint: "SIZE",
    description: "With --model-id: the most to take of the device (default: what there is)",
  },
  "max-context": {
    type: "string",
    valueHint: "T",
    description: "With --model-id: the longest text, in tokens (default: the model's own)",
  },
  ...hubFlags,
} satisfies ArgsDef;

/** Warnings, too, are more than somebody wants who wants quiet. */
const USUAL_LOG_LEVEL = "warn";

/** Which model makes the texts: that of a head, or one that this process loads. */
export const headFlags = {
  head: { type: "string", valueHint: "URL", description: "The node that holds layer 0 of a chain" },
  "model-id": {
    type: "string",
    valueHint: "ID|DIR",
    description: "Without --head: a model on the Hub or in a directory, which this process holds as a whole",
  },
  ...modelFlags,
  "log-level": { ...logFlags["log-level"], default: USUAL_LOG_LEVEL },
  "log-format": logFlags["log-format"],
} satisfies ArgsDef;

export type HeadArgs = Pick<ParsedArgs<typeof headFlags>, keyof typeof headFlags> & { readonly quiet?: boolean };

export interface OpenedHead extends AsyncDisposable {
  readonly client: HeadClient;
  /** Rejects when a model that this process holds cannot go on. */
  readonly failure: Promise<never>;
}

/** A text that is broken off is still in a pass, which nobody waits for any longer. */
const FAREWELL_MS = 500;

/**
 * Which of `--head` and `--model-id` says where texts come from. A flag on the command line wins over one of the environment, which
 * may be meant for nodes. Throws UserError `bad_usage` where both or neither do, or a node's flag is given for a chain.
 */
export function checkHeadArgs(args: HeadArgs): "head" | "model-id" {
  const hint = "give --head URL for a chain that runs, or --model-id for a model that this process holds";
  const given = (["head", "model-id"] as const).filter((flag) => args[flag] !== undefined);
  const [first, ...others] = given.length > 1 ? given.filter((flag) => isTyped(flag, args)) : given;
  if (given.length === 0) throw new UserError("bad_usage", "neither --head nor --model-id says which model", hint);
  if (first === undefined || others.length > 0) {
    throw new UserError("bad_usage", "both --head and --model-id are given", hint);
  }
  const idle = (Object.keys(modelFlags) as (keyof typeof modelFlags)[]).find((flag) => isTyped(flag, args));
  if (first === "model-id" || idle === undefined) return first;
  const problem = `--${idle} is for a model that this process holds (--model-id), and --head names a chain`;
  throw new UserError("bad_usage", problem, `give --${idle} to the nodes of the chain`);
}

/** Whether a flag is on the command line. */
function isTyped(flag: keyof HeadArgs & string, args: HeadArgs): boolean {
  const value = args[flag];
  const inEnvironment = process.env[environmentName(flag)];
  return (
    value !== undefined &&
    value !== false &&
    (inEnvironment === undefined || (value !== true && value !== inEnvironment))
  );
}

/**
 * The client of `--head`; or of a node with all layers of `--model-id`, started here on a free port of loopback, which leaving ends.
 * `sessions`: texts of the longest context that such a node has room for.
 */
export async function openHead(
  args: HeadArgs,
  { signal, sessions, quiet = args.quiet ?? false }: { signal: AbortSignal; sessions: number; quiet?: boolean },
): Promise<OpenedHead> {
  if (checkHeadArgs(args) === "head") {
    const failure = new Promise<never>(() => {});
    return { client: new HeadClient(args.head!), failure, [Symbol.asyncDispose]: async () => {} };
  }
  const line = new StatusLine(
    (text) => process.stderr.write(text),
    () => process.stderr.columns || 80,
  );
  const level = quiet && args["log-level"] === USUAL_LOG_LEVEL ? "error" : args["log-level"];
  const log = loggerOf({ ...args, "log-level": level }, (text) => line.print(text));
  const isTerminal = process.stderr.isTTY === true && process.env["TERM"] !== "dumb";
  const format = args["log-format"] as "text" | "json";
  const progress = quiet ? undefined : showDownload({ log, format, line: isTerminal ? line : undefined });
  const config = {
    modelId: args["model-id"]!,
    revision: args.revision,
    shardStart: 0,
    host: "127.0.0.1",
    port: 0,
    allowedHosts: [],
    allowedOrigins: [],
    device: args.device ?? "auto",
    memoryLimit: args["memory-limit"] === undefined ? undefined : byteSize("--memory-limit", args["memory-limit"]),
    quantization: args.quantization as Quantization | undefined,
    maxContext: wholeNumber("max-context", args["max-context"], 1),
    maxSessions: sessions,
    offline: args.offline,
    cacheDir: args["cache-dir"],
  };
  const running = await unlessAborted(startNode(config, { log, env: process.env, progress }), signal).finally(() =>
    line.clear(),
  );
  return {
    client: new HeadClient(running.url),
    failure: running.failure,
    async [Symbol.asyncDispose]() {
      await Promise.race([running.stop(), Bun.sleep(FAREWELL_MS)]);
    },
  };
}

function unlessAborted<T>(work: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    work.then(resolve, reject);
    signal.addEventListener("abort", () => reject(signal.reason as Error), { once: true });
  });
}
