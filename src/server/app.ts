import { Hono } from "hono";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import type { Stage } from "../engine/types.ts";
import type { Admission } from "../mesh/admission.ts";
import { HEADERS, PROTOCOL_VERSION } from "../protocol/headers.ts";
import type { MemoryInfo, NodeInfo } from "../protocol/info.ts";
import type { NodeFacts } from "../protocol/message.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import { errorReply } from "./errors.ts";
import { forward, type Limits } from "./forward.ts";
import { type Allowed, guard } from "./guard.ts";
import { Readiness } from "./health.ts";
import { Lifecycle } from "./lifecycle.ts";
import { Queue } from "./queue.ts";

export interface Identity {
  /** Of this process: another one after a restart. */
  readonly node: string;
  readonly modelId: string;
  /** The commit; null for a local directory. */
  readonly revision: string | null;
  readonly modelDigest: string;
  readonly quantization: string;
  readonly numerics: string;
  /** The adapter's name. */
  readonly device: string;
}

export interface AppOptions {
  readonly stage: Stage;
  /** A head's. */
  readonly tokenizer?: Tokenizer;
  readonly identity: Identity;
  /** The rest of the chain. Whoever made it starts and stops it. */
  readonly next?: Admission;
  readonly limits?: Partial<Limits>;
  readonly log: Logger;
  readonly memory: () => MemoryInfo;
  /** Beside loopback, under which hosts and from which web pages the node may be called. */
  readonly allowed?: Partial<Allowed>;
}

export interface App {
  fetch(request: Request): Promise<Response>;
  /** Refuses new calls from now on; resolves when those that run have their results. */
  drain(): Promise<void>;
}

const DEFAULT_LIMITS: Limits = { maxBodyBytes: 256 << 20, maxOutputBytes: 256 << 20, maxWaiting: 64, maxRows: 1024 };

/** The node as HTTP: `POST /forward`, `GET /info`, `GET /health/live`, `GET /health/ready`. */
export function createApp(options: AppOptions): App {
  const { stage, tokenizer, identity, next, log } = options;
  const limits = { ...DEFAULT_LIMITS, ...options.limits };
  const allowed: Allowed = { hosts: [], origins: [], ...options.allowed };
  const facts = factsOf(stage, identity, limits, tokenizer);
  const queue = new Queue(limits.maxWaiting);
  const lifecycle = new Lifecycle();
  const readiness = new Readiness({ stage, queue, lifecycle, next });
  const { numerics } = identity;
  const parts = { stage, tokenizer, facts, numerics, next, limits, queue, lifecycle, readiness };

  const hono = new Hono<{ Variables: { id: string } }>();
  hono.post("/forward", (c) => {
    lifecycle.check();
    return forward(c.req.raw, parts, (id) => c.set("id", id));
  });
  hono.get("/info", (c) => c.json(infoOf(options, limits)));
  hono.get("/health/live", (c) => c.json({ status: "live" }));
  hono.get("/health/ready", async (c) => {
    await readiness.check();
    return c.json({ status: "ready" });
  });
  const routes = hono.routes.map(({ method, path }) => ({ method, path })); // a copy: the next line adds to them
  for (const { method, path } of routes) hono.all(path, (c) => refuseMethod(c.req.method, path, method));
  hono.notFound((c) => refusePath(c.req.path, routes));

  const answerer = { node: identity.node, span: stage.info.span };
  const refuse = (error: unknown, request: Request, id = "-") => {
    const response = errorReply(error, answerer, log, {
      id,
      signal: request.signal,
      isProbe: URL.parse(request.url)?.pathname.startsWith("/health/"),
    });
    if (id !== "-") response.headers.set(HEADERS.requestId, id);
    return response;
  };
  hono.onError((error, c) => refuse(error, c.req.raw, c.get("id")));

  return {
    async fetch(request) {
      const response = await answer(request);
      response.headers.set(HEADERS.node, identity.node);
      return response;
    },
    drain: () => lifecycle.drain(),
  };

  async function answer(request: Request): Promise<Response> {
    try {
      guard(request.headers, allowed); // first: without a Host there is not even a URL to route by
    } catch (error) {
      return refuse(error, request);
    }
    return hono.fetch(request);
  }
}

function factsOf({ info }: Stage, { modelDigest }: Identity, { maxRows }: Limits, tokenizer?: Tokenizer): NodeFacts {
  const { span, hiddenSize, vocabSize, maxContext } = info;
  const encode =
    tokenizer && ((text: string, addSpecialTokens: boolean) => tokenizer.encode(text, { addSpecialTokens }));
  return { span, hiddenSize, vocabSize, maxContext, maxRows, model: modelDigest, encode };
}

function infoOf({ stage, tokenizer, identity, next, memory }: AppOptions, { maxRows }: Limits): NodeInfo {
  const { span, hiddenSize, vocabSize, maxContext } = stage.info;
  return {
    v: PROTOCOL_VERSION,
    node: identity.node,
    model_id: identity.modelId,
    revision: identity.revision,
    model: identity.modelDigest,
    tokenizer: tokenizer?.digest ?? null,
    layers: span.total,
    start: span.start,
    end: span.end,
    quantization: identity.quantization,
    numerics: identity.numerics,
    hidden_size: hiddenSize,
    vocab_size: vocabSize,
    max_context: maxContext,
    max_sessions: 0,
    max_rows: maxRows,
    device: identity.device,
    memory: memory(),
    next: next?.next.url ?? null,
  };
}

function refuseMethod(method: string, path: string, allowed: string): never {
  throw new UserError("method_not_allowed", `${path} does not take ${method}`, `use ${allowed}`, {
    details: { allowed },
  });
}

function refusePath(path: string, routes: readonly { method: string; path: string }[]): never {
  const known = routes.map((route) => `${route.method} ${route.path}`).join(", ");
  throw new UserError("not_found", `there is no ${path}`, `this node has ${known}`);
}
