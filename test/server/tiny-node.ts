import { UserError } from "../../src/base/errors.ts";
import { silentLogger, type Logger } from "../../src/base/log.ts";
import { Admission } from "../../src/mesh/admission.ts";
import { NextNode } from "../../src/mesh/next-node.ts";
import { type App, type AppOptions, createApp } from "../../src/server/app.ts";
import { serve, type Server } from "../../src/server/serve.ts";
import type { Tokenizer } from "../../src/tokenizer/tokenizer.ts";
import { HIDDEN, LAYERS, TinyStage, type TinyStageOptions, VOCAB } from "./tiny-stage.ts";

export { CONTEXT, fromBits, HIDDEN, LAYERS, toBits, VOCAB } from "./tiny-stage.ts";

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
  addedTokens: [],
  encodeMasked: (text, mask) => [...new TextEncoder().encode(text.replaceAll(mask, ""))],
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
  readonly textModel?: AppOptions["textModel"];
  readonly page?: AppOptions["page"];
  readonly timing?: AppOptions["timing"];
  readonly sessionIdleMs?: number;
  readonly clock?: () => number;
  readonly stage?: TinyStage;
}

let instances = 0;

/** A node on a free port of loopback, as the command line would put it together. */
export async function startNode(options: TinyNodeOptions): Promise<TinyNode> {
  const { start, end, model = "digest-of-tiny", log = silentLogger } = options;
  const stage = options.stage ?? new TinyStage(options);
  const node = options.node ?? `node-${++instances}`;
  const own = { node, model, end, hiddenSize: HIDDEN, vocabSize: VOCAB };
  const next = options.next && new NextNode({ url: options.next, own, timeoutMs: options.hopTimeoutMs });
  const admission = next ? new Admission({ next, log, poll: { wellMs: 30, firstMs: 5, mostMs: 30 } }) : undefined;
  const app = createApp({
    stage,
    tokenizer: start === 0 ? tinyTokenizer : undefined,
    identity: {
      node,
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
    textModel: options.textModel,
    page: options.page,
    timing: options.timing,
    sessionIdleMs: options.sessionIdleMs,
    clock: options.clock,
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
