import { UserError } from "../base/errors.ts";
import {
  type AloneResult,
  type SessionsResult,
  benchServe,
  contextsNeeded,
  type ServeBenchmark,
  type ServeBenchOptions,
} from "../mesh/bench-serve.ts";
import { planNode } from "../server/plan-node.ts";
import { loggerOf, wholeNumber, wordList } from "./flags.ts";
import { Interrupts, unlessInterrupted } from "./interrupt.ts";
import { checkHeadArgs, type HeadArgs, openHead } from "./open-head.ts";
import { openResults } from "./stdout.ts";

/** Flags of `meshnet bench serve` alone. */
export const serveFlags = {
  sessions: {
    type: "string",
    valueHint: "N,…",
    description: "serve: how many texts are made at a time (default: 1,4,16, or as many as the head has room for)",
  },
  tokens: { type: "string", default: "32", valueHint: "N", description: "serve: tokens of each" },
  "prompt-tokens": { type: "string", default: "16", valueHint: "N", description: "serve: tokens of their prompts" },
  "prefill-tokens": {
    type: "string",
    default: "900",
    valueHint: "N",
    description: "serve: tokens of the prompt that is read in beside a text",
  },
} as const;

export interface ServeArgs extends HeadArgs {
  readonly sessions?: string;
  readonly tokens: string;
  readonly "prompt-tokens": string;
  readonly "prefill-tokens": string;
  readonly json: boolean;
}

/** `meshnet bench serve`: how fast texts are made, of a chain or of a model that this process holds. */
export async function runBenchServe(args: ServeArgs, runs: number): Promise<number> {
  const typed = args.sessions === undefined ? undefined : wordList(args.sessions);
  const counts = typed?.map((text) => wholeNumber("sessions", text, 1, 1024)!);
  if (counts?.length === 0) throw new UserError("bad_usage", "--sessions is empty", "give numbers, as 1,4,16");
  const from = checkHeadArgs(args);
  const print = openResults();
  const signal = new Interrupts().begin();
  const log = loggerOf(args);
  const options: ServeBenchOptions = {
    sessions: counts,
    tokens: wholeNumber("tokens", args.tokens, 2)!,
    promptTokens: wholeNumber("prompt-tokens", args["prompt-tokens"], 1)!,
    prefillTokens: wholeNumber("prefill-tokens", args["prefill-tokens"], 1)!,
    runs,
    signal,
    onPhase: (phase, last) => log.info("measuring", { what: phase, ...(last && { before: summary(last) }) }),
  };
  const sessions = from === "head" ? 1 : contextsNeeded(options, await contextOf(args));
  return unlessInterrupted(signal, async () => {
    await using head = await openHead(args, { signal, sessions });
    const measured = await Promise.race([benchServe(head.client, options), head.failure]);
    await print(
      args.json ? JSON.stringify({ ...optionsJson(options), ...measured }, undefined, 2) : describe(measured, options),
    );
    return 0;
  });
}

async function contextOf(args: ServeArgs): Promise<number> {
  const config = {
    modelId: args["model-id"]!,
    revision: args.revision,
    cacheDir: args["cache-dir"],
    offline: args.offline,
    shardStart: 0,
    host: "",
    port: 0,
    allowedHosts: [],
    allowedOrigins: [],
    device: "auto",
    maxContext: wholeNumber("max-context", args["max-context"], 1),
  };
  const { load } = await planNode(config, { log: loggerOf({ ...args, "log-level": "error" }), env: process.env });
  return load.options.maxContext;
}

/** On slow devices a measurement takes minutes: what there is already is not kept back. */
const summary = (result: AloneResult | SessionsResult): string =>
  "sessions" in result
    ? `${rate(result.tokensPerSecond)} tokens/s, ${ms(result.perTokenMs.p50)} per token`
    : `${ms(result.wallMs / result.tokens)} per token`;

const optionsJson = ({ tokens, promptTokens }: ServeBenchOptions) => ({ tokens, promptTokens });

function describe(measured: ServeBenchmark, { tokens, promptTokens, runs }: ServeBenchOptions): string {
  const { model, nodes, alone, sessions, prefill } = measured;
  const [first, last] = [sessions[0]!, sessions.at(-1)!];
  const goal = first.sessions === 1 && last.sessions === 16 ? " (goal: at least 2)" : "";
  const gain = last.tokensPerSecond / first.tokensPerSecond;
  const slowdown = prefill.besideMs.p99 / prefill.idleMs.p99;
  const rows: [name: string, value: string][] = [
    ["model", model],
    ...nodes.map((node): [string, string] => ["node", `layers ${node.layers}, ${node.quantization}, ${node.device}`]),
    ["method", `POST /v1/completions, streamed, greedy; prompts of ${promptTokens} random token ids, no two alike;`],
    ["", "a token's time is from one event to the next, as the client sees it"],
    ["first token", `${spread(alone.firstTokenMs)} (a text alone, the median of ${runs})`],
    ...sessions.map(({ sessions: count, tokensPerSecond, perTokenMs, firstTokenMs }): [string, string] => [
      `${count} at a time`,
      [
        `${rate(tokensPerSecond)} tokens/s in all`.padEnd(24),
        `time per token p50 ${ms(perTokenMs.p50)}, p99 ${ms(perTokenMs.p99)}`.padEnd(44),
        `first token p50 ${ms(firstTokenMs.p50)}, last ${ms(firstTokenMs.max)}`,
      ].join(" "),
    ]),
    ["", `measured while all of them run, ${tokens} tokens of each on average`],
  ];
  if (sessions.length > 1) {
    rows.push([
      "together",
      `${last.sessions} at a time make ${gain.toFixed(2)} × the tokens/s of ${first.sessions}${goal}`,
    ]);
  }
  rows.push(
    [
      "long prompt",
      `${prefill.promptTokens} tokens read in ${ms(prefill.prefillMs)}; the time per token of a text beside it:`,
    ],
    [
      "",
      `p50 ${ms(prefill.besideMs.p50)}, p99 ${ms(prefill.besideMs.p99)}; before: p50 ${ms(prefill.idleMs.p50)}, p99 ${ms(prefill.idleMs.p99)}; p99 is ${slowdown.toFixed(2)} × that (goal: at most 3)`,
    ],
    ["overhead", overhead(alone)],
  );
  return rows.map(([name, value]) => `${name.padEnd(14)} ${value}`).join("\n");
}

function overhead({ tokens, wallMs, passMs }: AloneResult): string {
  if (passMs === null) return "not told: a node of the chain does not say how long its passes took";
  const per = (time: number) => ms(time / tokens);
  return `${per(wallMs - passMs)} per token beside the passes through the layers (goal: at most 1 ms): ${per(wallMs)} from the call to the answer's end, ${per(passMs)} of it in passes; a text alone, this client included`;
}

function spread(values: readonly number[]): string {
  const sorted = values.toSorted((a, b) => a - b);
  return `${ms(sorted[Math.floor(sorted.length / 2)]!)}, from ${ms(sorted[0]!)} to ${ms(sorted.at(-1)!)}`;
}

const rate = (value: number): string => value.toFixed(value < 10 ? 2 : 1);

/** `0.42 ms`, `18.3 ms`, `2.41 s`. */
function ms(value: number): string {
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value < 10 ? 2 : 1)} ms`;
}
