import { messageOf, UserError } from "../base/errors.ts";
import { readBody } from "../protocol/body.ts";
import { CONTAINER_TYPE } from "../protocol/container.ts";
import { parseErrorReply, type RemoteError } from "../protocol/error-reply.ts";
import { encodeFrame } from "../protocol/frame.ts";
import { HEADERS } from "../protocol/headers.ts";
import { type NodeInfo, parseInfo } from "../protocol/info.ts";
import type { ForwardRow } from "../protocol/message.ts";
import { decodeReply, type ForwardResult } from "../protocol/reply.ts";
import type { Want } from "../protocol/rows.ts";
import { networkProblem } from "./network.ts";

/** What this node is to the next one: what frames carry, and what admission compares. */
export interface OwnEnd {
  /** The model digest. */
  readonly model: string;
  /** The layer after this node's last: the next node must start there. */
  readonly end: number;
  readonly hiddenSize: number;
  readonly vocabSize: number;
}

/** A call to pass on. */
export interface HopCall {
  readonly rows: readonly ForwardRow[];
  /** [T, hiddenSize] bfloat16 */
  readonly values: Uint16Array;
  readonly want: Want;
  readonly requestId: string;
  readonly route?: readonly string[];
  /** What is left of the caller's patience; undefined: the hop's own timeout. */
  readonly deadlineMs?: number;
  /** Aborted when the caller is gone, or with a UserError when its patience is at its end. */
  readonly signal: AbortSignal;
}

export interface HopReply {
  readonly result: ForwardResult;
  /** The layer after the last one the result went through. */
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
   * Sends hidden states on. Throws UserError `next_unreachable`, `next_nonsense` or `deadline`, or the RemoteError that
   * this or a later hop answered.
   */
  async forward(call: HopCall): Promise<HopReply> {
    const { rows, want } = call;
    const deadlineMs = Math.max(1, Math.ceil(Math.min(call.deadlineMs ?? Infinity, this.#timeoutMs)));
    const { model, end: fromLayer, hiddenSize, vocabSize } = this.own;
    const { values, requestId, route } = call;
    const body = encodeFrame({ values, hiddenSize, rows, want, model, fromLayer, requestId, deadlineMs, route });

    return this.#within(deadlineMs, call.signal, async (signal) => {
      const init = { method: "POST", headers: { "Content-Type": CONTAINER_TYPE }, body, signal };
      const reply = await this.#request("forward", init);
      const tokens = values.length / hiddenSize;
      const bytes = await this.#body(reply, tokens * Math.max(hiddenSize, vocabSize) * 2 + REPLY_OVERHEAD_BYTES);
      if (!reply.ok) throw this.#refusal(reply, new TextDecoder().decode(bytes));
      return this.#sense(() => ({
        result: decodeReply(
          { status: reply.status, contentType: reply.headers.get("Content-Type") ?? "", body: bytes },
          { rows, want, hiddenSize, vocabSize },
        ),
        end: Number(/^\d+-(\d+)$/.exec(reply.headers.get(HEADERS.layers) ?? "")?.[1] ?? fromLayer),
        node: reply.headers.get(HEADERS.node),
      }));
    });
  }

  async #request(path: string, init: RequestInit): Promise<Response> {
    const url = new URL(path, this.url).href;
    // A redirect would send hidden states to a node that was never admitted.
    const send = () => this.#fetch(url, { ...init, redirect: "manual" });
    try {
      return await send();
    } catch (cause) {
      if (init.signal?.aborted || (cause as { code?: unknown }).code !== "ECONNRESET") throw this.#unreachable(cause);
    }
    // The connection broke before any reply, as an old one does after a restart. Nothing is kept of a stateless call,
    // so asking once more is harmless.
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

/** With a slash at its end, so that a path before it (a reverse proxy's) stays. */
export function parseNodeUrl(text: string): string {
  const url = URL.parse(text);
  const isPlain = url && !url.username && !url.password && !url.search && !url.hash; // it is told to whoever asks /info
  if (isPlain && /^https?:$/.test(url.protocol)) return url.href.replace(/\/*$/, "/");
  throw new UserError(
    "bad_usage",
    url?.password ? "the next node's URL has a password in it" : `the next node is "${text}"`,
    "give its URL of host, port and path, as in --next http://127.0.0.1:8002",
  );
}
