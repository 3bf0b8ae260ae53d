import { messageOf, UserError } from "../base/errors.ts";
import { readBody } from "../protocol/body.ts";
import type { ChainNode } from "../protocol/chain.ts";
import { parseChain } from "../protocol/chain-reply.ts";
import { CONTAINER_TYPE } from "../protocol/container.ts";
import { parseErrorReply, RemoteError } from "../protocol/error-reply.ts";
import { encodeFrame, type FrameRow } from "../protocol/frame.ts";
import { HEADERS } from "../protocol/headers.ts";
import { type NodeInfo, parseInfo } from "../protocol/info.ts";
import { decodeReply, type RowOutcome } from "../protocol/reply.ts";
import { DIRECT, networkProblem, plainUrl } from "./network.ts";

/** What this node is to the next one: what frames carry, and what admission compares. */
export interface OwnEnd {
  /** Instance id of this node, which every request says. */
  readonly node: string;
  /** The model digest. */
  readonly model: string;
  /** The layer after this node's last: the next node must start there. */
  readonly end: number;
  readonly hiddenSize: number;
  readonly vocabSize: number;
  /** This node's longest sequence, where nodes with theirs on different sides of `edge` would compute two different models. */
  readonly context?: { readonly own: number; readonly edge: number };
}

/** A frame to send. */
export interface HopCall {
  readonly rows: readonly FrameRow[];
  /** [T, hiddenSize] bfloat16 */
  readonly values: Uint16Array;
  /** [T] */
  readonly tokenIds?: Int32Array;
  readonly requestId: string;
  readonly route?: readonly string[];
  /** What is left of the callers' patience; undefined: the hop's own timeout. */
  readonly deadlineMs?: number;
  /** Aborted when the callers are gone, or with a UserError when their patience is at its end. */
  readonly signal: AbortSignal;
}

export interface HopReply {
  /** What came of each row. */
  readonly outcomes: readonly RowOutcome[];
  /** The layer after the last one the results went through. */
  readonly end: number;
  /** The next node's instance id. */
  readonly node: string | null;
}

/** What a hop may take where the caller names no deadline. */
const HOP_TIMEOUT_MS = 600_000;
/** For the small questions, `/info` and `/health/ready`. */
const ASK_TIMEOUT_MS = 3_000;
/** Headers, JSON and error replies beside the values of a reply. */
const REPLY_OVERHEAD_BYTES = 1 << 20;
/** An error or logprobs beside what a row gives. */
const ROW_BYTES = 4096;

type Fetch = (url: string, init: RequestInit) => Promise<Response>;

/** The next node of the chain, over HTTP. Every failure names it by its URL. */
export class NextNode {
  readonly url: string;
  readonly own: OwnEnd;
  readonly #fetch: Fetch;
  readonly #timeoutMs: number;

  /** Throws UserError `bad_usage` where `url` is not an http or https URL. */
  constructor(options: { url: string; own: OwnEnd; fetch?: Fetch; timeoutMs?: number }) {
    this.url = parseNodeUrl(options.url);
    this.own = options.own;
    this.#fetch = options.fetch ?? fetch;
    this.#timeoutMs = options.timeoutMs ?? HOP_TIMEOUT_MS;
  }

  /** Throws UserError `next_unreachable`, `next_nonsense` or `deadline`, or the next node's own refusal. */
  async info(): Promise<NodeInfo> {
    return this.#within(ASK_TIMEOUT_MS, undefined, async (signal) => {
      const reply = await this.#request("info", { signal });
      const text = new TextDecoder().decode(await this.#body(reply, REPLY_OVERHEAD_BYTES));
      if (!reply.ok) throw this.#refusal(reply, text);
      return this.#sense(() => parseInfo(text));
    });
  }

  /** Undefined where it is ready to take calls. Throws as `info` does, where it cannot say. */
  async notReady(): Promise<RemoteError | undefined> {
    return this.#within(ASK_TIMEOUT_MS, undefined, async (signal) => {
      const reply = await this.#request("health/ready", { signal });
      const text = new TextDecoder().decode(await this.#body(reply, REPLY_OVERHEAD_BYTES));
      if (reply.ok) return undefined;
      const refusal = this.#refusal(reply, text);
      if (refusal instanceof UserError) throw refusal;
      return refusal;
    });
  }

  /**
   * What it and the nodes after it are and do now, or as far as they answer in time: the rest is told as silent. Throws as
   * `info` does.
   */
  async chain(withinMs: number): Promise<ChainNode[]> {
    return this.#within(withinMs, undefined, async (signal) => {
      const reply = await this.#request("chain", { signal, headers: { [HEADERS.deadlineMs]: String(withinMs) } });
      const text = new TextDecoder().decode(await this.#body(reply, REPLY_OVERHEAD_BYTES));
      if (!reply.ok) throw this.#refusal(reply, text);
      return this.#sense(() => parseChain(text, this.own.end));
    });
  }

  /**
   * Sends hidden states on. Throws UserError `next_unreachable`, `next_nonsense` or `deadline`, or the RemoteError that
   * this or a later hop answered to the frame as a whole.
   */
  async forward(call: HopCall): Promise<HopReply> {
    const { rows } = call;
    const deadlineMs = Math.max(1, Math.ceil(Math.min(call.deadlineMs ?? Infinity, this.#timeoutMs)));
    const { model, end: fromLayer, hiddenSize, vocabSize } = this.own;
    const { values, tokenIds, requestId, route } = call;
    const body = encodeFrame({ values, hiddenSize, tokenIds, rows, model, fromLayer, requestId, deadlineMs, route });

    return this.#within(deadlineMs, call.signal, async (signal) => {
      const init = { method: "POST", headers: { "Content-Type": CONTAINER_TYPE }, body, signal };
      const tokens = values.length / hiddenSize;
      const limit = tokens * Math.max(hiddenSize, vocabSize) * 2 + rows.length * ROW_BYTES + REPLY_OVERHEAD_BYTES;
      const exchange = async () => {
        const reply = await this.#request("forward", init);
        return { reply, bytes: await this.#body(reply, limit) };
      };
      const { reply, bytes } = await exchange().catch((error: unknown) => {
        // Broken off in the middle of the reply: of sessions it is kept, and can be had again.
        const isBroken = error instanceof UserError && isReset(error.cause) && !signal.aborted;
        if (isBroken && rows.every(({ session }) => session !== undefined)) return exchange();
        throw error;
      });
      const node = reply.headers.get(HEADERS.node);
      if (!reply.ok) {
        const refusal = this.#refusal(reply, new TextDecoder().decode(bytes));
        const failed = refusal instanceof RemoteError ? refusal.rows : undefined;
        if (failed?.length !== rows.length) throw refusal;
        return { outcomes: failed.map((error) => ({ kind: "error", error })), end: fromLayer, node };
      }
      return this.#sense(() => ({
        outcomes: decodeReply(
          { status: reply.status, contentType: reply.headers.get("Content-Type") ?? "", body: bytes },
          { rows, hiddenSize, vocabSize },
        ),
        end: Number(/^\d+-(\d+)$/.exec(reply.headers.get(HEADERS.layers) ?? "")?.[1] ?? fromLayer),
        node,
      }));
    });
  }

  /**
   * Frees a session on this node and those after it. False where none of them knows it. Throws as `info` does, or the
   * RemoteError of a hop.
   */
  async deleteSession(id: string): Promise<boolean> {
    return this.#within(ASK_TIMEOUT_MS, undefined, async (signal) => {
      const reply = await this.#request(`sessions/${encodeURIComponent(id)}`, { method: "DELETE", signal });
      const text = new TextDecoder().decode(await this.#body(reply, REPLY_OVERHEAD_BYTES));
      if (reply.ok) return true;
      const refusal = this.#refusal(reply, text);
      if (refusal instanceof RemoteError && refusal.body.code === "not_found") return false;
      throw refusal;
    });
  }

  async #request(path: string, init: RequestInit): Promise<Response> {
    const url = new URL(path, this.url).href;
    const headers = { ...(init.headers as Record<string, string> | undefined), [HEADERS.node]: this.own.node };
    const send = () => this.#fetch(url, { ...init, headers, ...DIRECT });
    try {
      return await send();
    } catch (cause) {
      if (init.signal?.aborted || !isReset(cause)) throw this.#unreachable(cause);
    }
    // The connection broke before any reply, as an old one does after a restart. Nothing is kept of a stateless row, and
    // a step of a session is run once however often it comes, so asking once more is harmless.
    try {
      return await send();
    } catch (cause) {
      throw this.#unreachable(cause);
    }
  }

  async #body(reply: Response, limit: number): Promise<Uint8Array> {
    try {
      return await readBody(reply, limit, "its reply");
    } catch (cause) {
      if (cause instanceof UserError) throw this.#nonsense(cause);
      throw this.#unreachable(cause);
    }
  }

  /** Ends with UserError `deadline` after `ms`, whatever `work` is waiting for. */
  async #within<T>(ms: number, caller: AbortSignal | undefined, work: (signal: AbortSignal) => Promise<T>): Promise<T> {
    const timeout = new AbortController();
    const timer = setTimeout(() => timeout.abort(), ms);
    try {
      return await work(caller ? AbortSignal.any([caller, timeout.signal]) : timeout.signal);
    } catch (cause) {
      const isGone = caller?.aborted && !(caller.reason instanceof UserError); // a UserError: its deadline has passed
      if (isGone || !(caller?.aborted || timeout.signal.aborted)) throw cause;
      throw new UserError(
        "deadline",
        `the next node ${this.url} did not answer within ${ms} ms`,
        "give more time (X-Meshnet-Deadline-Ms), or look at that node's log",
        { cause, details: { hop: this.url } },
      );
    } finally {
      clearTimeout(timer);
    }
  }

  #refusal(reply: Response, text: string): RemoteError | UserError {
    const refusal = parseErrorReply(reply.status, reply.headers, text);
    return refusal ?? this.#nonsense(`it answered ${reply.status} without a meshnet error`);
  }

  #sense<T>(read: () => T): T {
    try {
      return read();
    } catch (cause) {
      if (cause instanceof UserError) throw this.#nonsense(cause);
      throw cause;
    }
  }

  #unreachable(cause: unknown): UserError {
    return new UserError(
      "next_unreachable",
      `the next node ${this.url} cannot be reached: ${networkProblem(cause)}`,
      "start it, or correct --next",
      { cause, details: { hop: this.url } },
    );
  }

  #nonsense(cause: unknown): UserError {
    const problem = typeof cause === "string" ? cause : messageOf(cause);
    return new UserError(
      "next_nonsense",
      `the next node ${this.url} answered nonsense: ${problem}`,
      "is --next the URL of a meshnet node of this version?",
      { cause, details: { hop: this.url } },
    );
  }
}

const isReset = (cause: unknown): boolean => (cause as { code?: unknown } | undefined)?.code === "ECONNRESET";

/** As `plainUrl`. Throws UserError `bad_usage`. */
export function parseNodeUrl(text: string): string {
  const url = plainUrl(text);
  if (url !== undefined) return url;
  throw new UserError(
    "bad_usage",
    URL.parse(text)?.password ? "the next node's URL has a password in it" : `the next node is "${text}"`,
    "give its URL of host, port and path, as in --next http://127.0.0.1:8002",
  );
}
