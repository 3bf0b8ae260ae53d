import { Hono } from "hono";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { cut } from "../base/quote.ts";
import { isHead } from "../base/span.ts";
import type { Stage } from "../engine/types.ts";
import type { Admission } from "../mesh/admission.ts";
import { HEADERS, PROTOCOL_VERSION, readCallFields } from "../protocol/headers.ts";
import type { ChainInfo } from "../protocol/chain.ts";
import type { CacheInfo, MemoryInfo, NodeInfo } from "../protocol/info.ts";
import type { NodeFacts } from "../protocol/message.ts";
import { countProbe } from "../protocol/probe.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import type { Page } from "../ui/page.ts";
import { Callers } from "./callers.ts";
import { ChainState } from "./chain.ts";
import { describeError, errorReply } from "./errors.ts";
import { forward, type Limits } from "./forward.ts";
import { type Allowed, guard } from "./guard.ts";
import { Readiness } from "./health.ts";
import { Lifecycle } from "./lifecycle.ts";
import { openAiErrorReply, toldByOpenAi } from "./openai/errors.ts";
import { FrontDoor, type FrontDoorParts } from "./openai/front-door.ts";
import type { TextModel } from "./openai/text-model.ts";
import { mountPage } from "./page.ts";
import { RowRunner } from "./rows.ts";

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
  /** Of the weights that a pass of one token reads. */
  readonly weightBytesPerToken?: number;
}

export interface AppOptions {
  readonly stage: Stage;
  /** A head's. */
  readonly tokenizer?: Tokenizer;
  /** A head's: what texts need beside it. */
  readonly textModel?: Partial<TextModel>;
  readonly identity: Identity;
  /** The rest of the chain. Whoever made it starts and stops it. */
  readonly next?: Admission;
  readonly limits?: Partial<Limits>;
  readonly log: Logger;
  readonly memory: () => MemoryInfo;
  /** Milliseconds after its last step at which a session is forgotten; default 10 minutes. */
  readonly sessionIdleMs?: number;
  /** What that is measured with, in milliseconds from anywhere; default `performance.now`. */
  readonly clock?: () => number;
  /** Of streams. */
  readonly timing?: FrontDoorParts["timing"];
  /** To be had at `/`; it may call this node. */
  readonly page?: Page;
  /** Beside loopback, under which hosts and from which web pages the node may be called. */
  readonly allowed?: Partial<Omit<Allowed, "ownPage">>;
}

export interface App {
  fetch(request: Request): Promise<Response>;
  /** What runs rows, for callers in this process. */
  readonly runner: RowRunner;
  /** Refuses new calls from now on; when those that run have their results, ends all sessions and resolves. */
  drain(): Promise<void>;
}

const DEFAULT_LIMITS: Limits = {
  maxBodyBytes: 256 << 20,
  maxOutputBytes: 256 << 20,
  maxWaiting: 64,
  maxRows: 1024,
  maxSessions: 1024, // their room is counted in tokens, by the stage
};
const SESSION_IDLE_MS = 600_000;

/**
 * The node as HTTP: `POST /forward`, `DELETE /sessions/{id}`, `POST /probe`, `GET /info`, `GET /chain`, `GET /health/live`,
 * `GET /health/ready`; on a head also `/v1`, and a page at `/`.
 */
export function createApp(options: AppOptions): App {
  const { stage, tokenizer, identity, next, log } = options;
  const limits = { ...DEFAULT_LIMITS, ...options.limits };
  const allowed: Allowed = { hosts: [], origins: [], ...options.allowed, ownPage: options.page !== undefined };
  const facts = factsOf(stage, identity, limits, tokenizer);
  // The node before this one has let a whole call in, and sends it on in parts.
  const maxWaiting = limits.maxWaiting + (isHead(stage.info.span) ? 0 : limits.maxRows);
  const idleMs = options.sessionIdleMs ?? SESSION_IDLE_MS;
  const callers = new Callers(options.clock);
  const isGone = (node: string) => callers.isGone(node);
  const runner = new RowRunner({ stage, next, ...limits, maxWaiting, idleMs, log, isGone, clock: options.clock });
  const expire = () => {
    runner.expire();
    callers.tidy();
  };
  const expiring = setInterval(expire, Math.min(idleMs / 2, EXPIRE_MS));
  expiring.unref(); // nothing waits for it
  const lifecycle = new Lifecycle();
  const readiness = new Readiness({ runner, lifecycle, next });
  const chain = new ChainState({
    stage,
    next,
    readiness,
    ...identity,
    tokensPerSecond: () => runner.tokensPerSecond,
    clock: options.clock,
  });
  const answerer = { node: identity.node, span: stage.info.span };
  const parts = { runner, tokenizer, facts, numerics: identity.numerics, limits, lifecycle, answerer, log };

  const hono = new Hono<{ Variables: { id: string } }>();
  hono.post("/forward", (c) => {
    lifecycle.check();
    return forward(c.req.raw, parts, (id) => c.set("id", id));
  });
  hono.delete("/sessions/:id", async (c) => {
    await endSession(c.req.param("id"), c.req.raw.headers, runner);
    return c.body(null, 204);
  });
  hono.post("/probe", async (c) => c.json(await countProbe(c.req.raw)));
  hono.get("/info", (c) => c.json(infoOf(options, limits, runner)));
  hono.get("/chain", async (c) => {
    const nodes = await chain.nodes(readCallFields(c.req.raw.headers).deadlineMs);
    return c.json({ v: PROTOCOL_VERSION, layers: stage.info.span.total, nodes } satisfies ChainInfo);
  });
  hono.get("/health/live", (c) => c.json({ status: "live" }));
  hono.get("/health/ready", async (c) => {
    await readiness.check();
    return c.json({ status: "ready" });
  });
  if (tokenizer) frontDoorOf(options, tokenizer, { ...parts, maxWaiting: limits.maxWaiting }).mount(hono);
  if (options.page) mountPage(hono, options.page);
  const routes = hono.routes.map(({ method, path }) => ({ method, path })); // a copy: the next line adds to them
  for (const { method, path } of routes) hono.all(path, (c) => refuseMethod(c.req.method, path, method));
  hono.notFound((c) => refusePath(c.req.path, routes, tokenizer === undefined));

  const refuse = (error: unknown, request: Request, id = "-") => {
    const path = URL.parse(request.url)?.pathname;
    const isOpenAi = path?.startsWith(OPENAI_PATH);
    // A head whose caller has hung up ends the session on nodes that may never have had it.
    const isEnd = request.method === "DELETE" && path?.startsWith("/sessions/");
    const isEndOfNothing = isEnd && error instanceof UserError && error.code === "not_found";
    const isProbe = path?.startsWith("/health/") || isEndOfNothing;
    const about = { id, signal: request.signal, isProbe, ...(isOpenAi && { told: toldByOpenAi }) };
    const response =
      isOpenAi && !request.signal.aborted
        ? openAiErrorReply(describeError(error, answerer, log, about), id)
        : errorReply(error, answerer, log, about);
    if (id !== "-") response.headers.set(HEADERS.requestId, id);
    return response;
  };
  hono.onError((error, c) => refuse(error, c.req.raw, c.get("id")));

  return {
    async fetch(request) {
      callers.hear(request.headers);
      const response = await answer(request);
      response.headers.set(HEADERS.node, identity.node);
      return response;
    },
    runner,
    async drain() {
      await lifecycle.drain();
      clearInterval(expiring);
      runner.close();
    },
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

/** How often sessions are looked at that may have expired. */
const EXPIRE_MS = 30_000;

const OPENAI_PATH = "/v1/";

function frontDoorOf(
  { textModel, identity, next, timing }: AppOptions,
  tokenizer: Tokenizer,
  parts: Pick<FrontDoorParts, "runner" | "numerics" | "lifecycle" | "answerer" | "log" | "maxWaiting">,
): FrontDoor {
  return new FrontDoor({ ...parts, tokenizer, next, timing, model: textModel ?? {}, modelId: identity.modelId });
}

async function endSession(id: string, headers: Headers, runner: RowRunner): Promise<void> {
  const { route } = readCallFields(headers);
  if (await runner.deleteSession(id, route)) return;
  throw new UserError("not_found", `no node of this chain has the session ${cut(id)}`, "it may have expired");
}

function factsOf({ info }: Stage, { modelDigest }: Identity, { maxRows }: Limits, tokenizer?: Tokenizer): NodeFacts {
  const { span, hiddenSize, vocabSize, maxContext } = info;
  const encode =
    tokenizer && ((text: string, addSpecialTokens: boolean) => tokenizer.encode(text, { addSpecialTokens }));
  return { span, hiddenSize, vocabSize, maxContext, maxRows, model: modelDigest, encode };
}

function infoOf(
  { stage, tokenizer, textModel, identity, next, memory }: AppOptions,
  limits: Limits,
  { maxContext }: RowRunner,
): NodeInfo {
  const { span, hiddenSize, vocabSize } = stage.info;
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
    max_sessions: limits.maxSessions,
    max_rows: limits.maxRows,
    max_body_bytes: limits.maxBodyBytes,
    device: identity.device,
    weight_bytes_per_token: identity.weightBytesPerToken,
    memory: memory(),
    cache: cacheInfo(stage),
    work: stage.work && { passes: stage.work.passes, pass_ms: stage.work.ms },
    texts: textModel && {
      chat: textModel.chatTemplate !== undefined,
      do_sample: textModel.defaults?.doSample ?? false,
    },
    next: next?.next.url ?? null,
  };
}

function cacheInfo({ cacheUse }: Stage): CacheInfo {
  const { pageTokens, pages, reservedPages, sessions, prefixHits, prefixTokens } = cacheUse;
  return {
    page_tokens: pageTokens,
    pages,
    reserved_pages: reservedPages,
    sessions,
    prefix_hits: prefixHits,
    prefix_tokens: prefixTokens,
  };
}

function refuseMethod(method: string, path: string, allowed: string): never {
  throw new UserError("method_not_allowed", `${cut(readable(path))} does not take ${method}`, `use ${allowed}`, {
    details: { allowed },
  });
}

/** `/sessions/{id}` of `/sessions/:id`, as the documents have it. */
const readable = (path: string): string => path.replace(/:(\w+)(\{.*?\})?/g, "{$1}");

function refusePath(path: string, routes: readonly { method: string; path: string }[], isNoHead: boolean): never {
  const known = routes.map((route) => `${route.method} ${readable(route.path)}`).join(", ");
  const hint =
    isNoHead && (path === "/" || path.startsWith(OPENAI_PATH))
      ? "ask the head: the node that holds layer 0"
      : `this node has ${known}`;
  throw new UserError("not_found", `there is no ${cut(path)}`, hint);
}
