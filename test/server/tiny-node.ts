import { UserError } from "../../src/base/errors.ts";
import { silentLogger, type Logger } from "../../src/base/log.ts";
import { isTail } from "../../src/base/span.ts";
import type { Stage, StageInput, StageOutput, Want } from "../../src/engine/types.ts";
import { Admission } from "../../src/mesh/admission.ts";
import { NextNode } from "../../src/mesh/next-node.ts";
import { type App, type AppOptions, createApp } from "../../src/server/app.ts";
import { serve, type Server } from "../../src/server/serve.ts";
import type { Tokenizer } from "../../src/tokenizer/tokenizer.ts";

/**
 * A model of 4 layers whose numbers a test can follow, in whole numbers that bfloat16 holds exactly. A hidden state is
 * [token id, position, layers so far, what attention saw]. Each layer adds its number, and the sum of the ids up to the
 * token, so a row that saw another row's token or a padded slot shows it. The tail's token is the sum of all four.
 */
export const LAYERS = 4;
export const HIDDEN = 4;
export const VOCAB = 256;
export const CONTEXT = 40;

export interface TinyStageOptions {
  readonly start: number;
  readonly end: number;
  readonly eosTokenIds?: readonly number[];
  /** The tail's token, whatever went in. */
  readonly token?: number;
  /** Awaited by each call before it runs. */
  readonly gate?: () => Promise<void> | void;
}

export class TinyStage implements Stage {
  readonly info;
  calls = 0;

  constructor(readonly options: TinyStageOptions) {
    const span = { start: options.start, end: options.end, total: LAYERS };
    const eosTokenIds = options.eosTokenIds ?? [];
    this.info = { span, hiddenSize: HIDDEN, vocabSize: VOCAB, maxContext: CONTEXT, eosTokenIds };
  }

  async forward(input: StageInput, want: Want): Promise<StageOutput> {
    this.calls++;
    await this.options.gate?.();
    const values = input.kind === "ids" ? embed(input) : input.hidden;
    const states = Array.from(values, fromBits);
    let first = 0;
    for (const { tokens } of input.rows) {
      for (let layer = this.info.span.start; layer < this.info.span.end; layer++)
        runLayer(states, first, tokens, layer);
      first += tokens;
    }
    if (!isTail(this.info.span)) return { kind: "hidden", values: toBits(states) };
    return this.#give(
      states,
      input.rows.map(({ tokens }) => tokens),
      want,
    );
  }

  destroy(): void {}

  #give(states: number[], lengths: number[], want: Want): StageOutput {
    const tokenAt = (index: number) =>
      this.options.token ?? states.slice(index * HIDDEN, (index + 1) * HIDDEN).reduce((a, b) => a + b) % VOCAB;
    const lasts = lengths.map((_, row) => lengths.slice(0, row + 1).reduce((a, b) => a + b) - 1);
    const all = Array.from({ length: states.length / HIDDEN }, (_, index) => index);
    const logits = (indices: number[]) =>
      toBits(indices.flatMap((index) => Array.from({ length: VOCAB }, (_, id) => (id === tokenAt(index) ? 1 : 0))));
    switch (want) {
      case "token":
        return { kind: "token", ids: lasts.map(tokenAt) };
      case "logits":
        return { kind: "logits", values: logits(lasts) };
      case "all_logits":
        return { kind: "all_logits", values: logits(all) };
      case "hidden":
        return { kind: "hidden", values: toBits(states) };
      case "none":
        return { kind: "none" };
    }
  }
}

function embed({ ids, rows }: Extract<StageInput, { kind: "ids" }>): Uint16Array {
  const positions = rows.flatMap(({ tokens, positionStart }) =>
    Array.from({ length: tokens }, (_, i) => positionStart + i),
  );
  return toBits(Array.from(ids).flatMap((id, index) => [id, positions[index]!, 0, 0]));
}

function runLayer(states: number[], first: number, tokens: number, layer: number): void {
  let seen = 0;
  for (let index = first; index < first + tokens; index++) {
    const at = index * HIDDEN;
    seen += states[at]!;
    states[at + 2] = (states[at + 2]! + layer + 1) % 64;
    states[at + 3] = (states[at + 3]! + seen) % 64;
  }
}

export const toBits = (values: readonly number[]): Uint16Array =>
  Uint16Array.from(values, (value) => new Uint32Array(Float32Array.of(value).buffer)[0]! >>> 16);

export const fromBits = (bits: number): number => new Float32Array(Uint32Array.of(bits << 16).buffer)[0]!;

/** A token for each byte of UTF-8, and 0 before them where special tokens are asked for. */
export const tinyTokenizer: Tokenizer = {
  vocabSize: VOCAB,
  digest: "tiny-tokenizer",
  encode: (text, { addSpecialTokens = true } = {}) => [
    ...(addSpecialTokens ? [0] : []),
    ...new TextEncoder().encode(text),
  ],
  decode: (ids) => new TextDecoder().decode(Uint8Array.from(ids)),
  isSpecial: (id) => id === 0,
  tokenBytes: (id) => Uint8Array.of(id),
};

export interface TinyNode {
  readonly url: string;
  readonly stage: TinyStage;
  readonly app: App;
  readonly server: Server;
  readonly admission: Admission | undefined;
  stop(): Promise<void>;
}

export interface TinyNodeOptions extends TinyStageOptions {
  readonly next?: string;
  readonly model?: string;
  readonly node?: string;
  readonly port?: number;
  readonly log?: Logger;
  /** Do not wait until the next node is admitted. */
  readonly eager?: boolean;
  readonly hopTimeoutMs?: number;
  readonly limits?: AppOptions["limits"];
  readonly allowed?: AppOptions["allowed"];
  readonly stage?: TinyStage;
}

let instances = 0;

/** A node on a free port of loopback, as the command line would put it together. */
export async function startNode(options: TinyNodeOptions): Promise<TinyNode> {
  const { start, end, model = "digest-of-tiny", log = silentLogger } = options;
  const stage = options.stage ?? new TinyStage(options);
  const own = { model, end, hiddenSize: HIDDEN, vocabSize: VOCAB };
  const next = options.next && new NextNode({ url: options.next, own, timeoutMs: options.hopTimeoutMs });
  const admission = next ? new Admission({ next, log, poll: { wellMs: 30, firstMs: 5, mostMs: 30 } }) : undefined;
  const app = createApp({
    stage,
    tokenizer: start === 0 ? tinyTokenizer : undefined,
    identity: {
      node: options.node ?? `node-${++instances}`,
      modelId: "tiny",
      revision: null,
      modelDigest: model,
      quantization: "bfloat16",
      numerics: "tiny-numerics",
      device: "none",
    },
    next: admission,
    limits: options.limits,
    log,
    memory: () => ({ planned: 3, allocated: 2, available: null }),
    allowed: options.allowed,
  });
  const server = serve(app, { hostname: "127.0.0.1", port: options.port ?? 0 });
  const admitted = admission?.start();
  admitted?.catch(() => {}); // a test that expects it looks at the admission
  if (!options.eager) await admitted;
  const stop = async () => {
    admission?.stop();
    await server.stop();
  };
  return { url: server.url, stage, app, server, admission, stop };
}

/** A chain of nodes cut at `cuts`, head first. */
export async function startChain(cuts: readonly number[], options: Partial<TinyNodeOptions> = {}): Promise<TinyNode[]> {
  const nodes: TinyNode[] = [];
  const edges = [0, ...cuts, LAYERS];
  for (let i = edges.length - 2; i >= 0; i--) {
    nodes.unshift(await startNode({ ...options, start: edges[i]!, end: edges[i + 1]!, next: nodes[0]?.url }));
  }
  return nodes;
}

export async function post(
  url: string,
  body: string | Uint8Array,
  contentType: string,
  headers: Record<string, string> = {},
): Promise<Response> {
  return fetch(new URL("forward", url), { method: "POST", body, headers: { "Content-Type": contentType, ...headers } });
}

export const postJson = (url: string, body: unknown, headers?: Record<string, string>): Promise<Response> =>
  post(url, JSON.stringify(body), "application/json", headers);

export const bytes = (values: Uint16Array): Uint8Array =>
  new Uint8Array(values.buffer, values.byteOffset, values.byteLength);

export const base64 = (values: Uint8Array): string => Buffer.from(values).toString("base64");

export interface ErrorShape {
  error: { code: string; message: string; hint: string; node: string; layers: string } & Record<string, unknown>;
}

export const errorOf = async (reply: Response): Promise<ErrorShape["error"]> =>
  ((await reply.json()) as ErrorShape).error;

/** Until `check` holds; a test that waits in vain runs into its own time limit. */
export async function until(check: () => boolean | Promise<boolean>): Promise<void> {
  while (!(await check())) await Bun.sleep(5);
}

/** A promise and the key to it. */
export function gate(): { wait: () => Promise<void>; open: () => void } {
  const { promise, resolve } = Promise.withResolvers<void>();
  return { wait: () => promise, open: resolve };
}

export const deviceLost = () => new UserError("device_lost", "the device is gone", "restart the node");
