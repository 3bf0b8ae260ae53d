import { type ErrorCode, ERRORS, UserError } from "../base/errors.ts";
import { readBody } from "../protocol/body.ts";
import { type NodeInfo, parseInfo } from "../protocol/info.ts";
import { DIRECT, networkProblem, plainUrl } from "./network.ts";
import { sseData } from "./sse.ts";

/** One message of a conversation. */
export interface ChatTurn {
  readonly role: "system" | "user" | "assistant";
  readonly content: string;
}

/** What a text is made of: it goes on from a prompt (text or token ids), or answers a conversation. */
export type TextStart = { readonly prompt: string | readonly number[] } | { readonly messages: readonly ChatTurn[] };

/** How it is made, in the names of the API. What is absent is the head's to decide. */
export interface TextOptions {
  readonly max_tokens?: number;
  readonly temperature?: number;
  readonly top_k?: number;
  readonly top_p?: number;
  readonly min_p?: number;
  readonly repetition_penalty?: number;
  readonly seed?: number;
  readonly stop?: readonly string[];
}

/** A further piece of a text. */
export interface TextEvent {
  readonly text: string;
  /** Of the last piece: by itself or by a stop string; or there is no room for more. */
  readonly finish: "stop" | "length" | null;
  /** Comes with the end. */
  readonly usage?: TextUsage;
}

/** Tokens. */
export interface TextUsage {
  readonly prompt: number;
  readonly completion: number;
  /** Of the prompt: what the chain had already. */
  readonly cached: number;
}

export interface HeadClientOptions {
  /** A head that says nothing for so long (it says every 10 seconds that it lives) is taken for dead. Default 60 s. */
  readonly silenceMs?: number;
}

const SILENCE_MS = 60_000;
/** Of a reply that is no stream: an error, or whatever may come instead of one. */
const MAX_REPLY_BYTES = 1 << 20;

/**
 * A client of a head's OpenAI-compatible API.
 *
 * Its methods throw UserError: what the head refused, `next_unreachable` where it cannot be reached or breaks off, `next_nonsense`
 * where what answers is no head; and the signal's reason.
 */
export class HeadClient {
  readonly url: string;
  readonly #silenceMs: number;

  /** Throws UserError `bad_usage` unless `url` is one. */
  constructor(url: string, { silenceMs = SILENCE_MS }: HeadClientOptions = {}) {
    const plain = plainUrl(url);
    if (plain === undefined) {
      throw new UserError("bad_usage", `--head ${url} is not a URL`, "give the head's URL, as http://127.0.0.1:8001");
    }
    this.url = plain.replace(/\/v1\/$/, "/"); // the address that OpenAI's clients are given
    this.#silenceMs = silenceMs;
  }

  /** What the head is. Undefined where something that is no node itself passes the API on. */
  async info(signal: AbortSignal): Promise<NodeInfo | undefined> {
    const patience = AbortSignal.timeout(this.#silenceMs);
    const whole = AbortSignal.any([signal, patience]);
    try {
      const reply = await this.#fetch("info", { signal: whole });
      if (reply.status === 404) return undefined;
      const text = await this.#textOf(reply, whole);
      if (!reply.ok) throw this.#refusal(reply.status, text);
      return this.#infoOf(text);
    } catch (error) {
      signal.throwIfAborted();
      throw patience.aborted ? this.#broken(`it has said nothing for ${this.#silenceMs / 1000} s`, error) : error;
    }
  }

  /** As `info`; throws UserError `not_found` where the node is none that a text can begin at. */
  async headInfo(signal: AbortSignal): Promise<NodeInfo | undefined> {
    const info = await this.info(signal);
    if (info === undefined || info.start === 0) return info;
    const what = `the node at ${this.url} is no head: it has the layers ${info.start}-${info.end} of ${info.layers}`;
    throw new UserError("not_found", what, "ask the head: the node that holds layer 0");
  }

  /** Makes a text and gives it piece by piece. Leaving it early, or the signal, ends it on all nodes. */
  async *text(start: TextStart, options: TextOptions, signal: AbortSignal): AsyncGenerator<TextEvent> {
    const path = "prompt" in start ? "v1/completions" : "v1/chat/completions";
    const body = { ...start, ...options, stream: true, stream_options: { include_usage: true } };
    const end = new AbortController();
    const silence = new Silence(this.#silenceMs, () => end.abort());
    const whole = AbortSignal.any([signal, end.signal]);
    try {
      const headers = { "Content-Type": "application/json" };
      const reply = await this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: whole });
      const type = reply.headers.get("Content-Type") ?? "nothing";
      if (!reply.ok) throw this.#refusal(reply.status, await this.#textOf(reply, whole));
      if (!type.startsWith("text/event-stream")) throw this.#nonsense(type);
      yield* this.#events(sseData(this.#chunks(reply, whole, silence)));
    } catch (error) {
      signal.throwIfAborted();
      throw silence.isOver ? this.#broken(`it has said nothing for ${this.#silenceMs / 1000} s`, error) : error;
    } finally {
      silence.end();
      end.abort();
    }
  }

  #infoOf(text: string): NodeInfo {
    try {
      return parseInfo(text);
    } catch (cause) {
      throw this.#nonsense("what no meshnet node would", cause);
    }
  }

  async *#events(data: AsyncIterable<string>): AsyncGenerator<TextEvent> {
    for await (const item of data) {
      if (item === "[DONE]") return;
      const event = parseEvent(item);
      if (event === undefined) throw this.#nonsense("an event that is no piece of a text");
      if ("error" in event) throw refusal(event.error, undefined);
      yield event;
    }
    throw this.#broken("it broke off in the middle of the text");
  }

  async *#chunks(reply: Response, signal: AbortSignal, silence: Silence): AsyncGenerator<Uint8Array> {
    try {
      for await (const chunk of (reply.body ?? []) as AsyncIterable<Uint8Array>) {
        silence.heard();
        yield chunk;
      }
    } catch (cause) {
      signal.throwIfAborted();
      throw this.#broken(`it broke off in the middle of the text (${networkProblem(cause)})`, cause);
    }
  }

  async #fetch(path: string, init: RequestInit & { signal: AbortSignal }): Promise<Response> {
    try {
      // Bun gives up after five minutes by itself, which a long prompt on a slow device may take.
      return await fetch(this.url + path, { ...init, ...DIRECT, timeout: false } as RequestInit);
    } catch (cause) {
      init.signal.throwIfAborted();
      throw new UserError(
        "next_unreachable",
        `the head ${this.url} cannot be reached: ${networkProblem(cause)}`,
        "start it with meshnet node --shard-start 0, or correct --head",
        { cause },
      );
    }
  }

  async #textOf(reply: Response, signal: AbortSignal): Promise<string> {
    try {
      return new TextDecoder().decode(await readBody(reply, MAX_REPLY_BYTES, "the reply"));
    } catch (cause) {
      signal.throwIfAborted();
      throw cause instanceof UserError
        ? this.#nonsense("an endless reply", cause)
        : this.#broken("it broke off", cause);
    }
  }

  #refusal(status: number, text: string): UserError {
    let error: unknown;
    try {
      error = (JSON.parse(text) as { error?: unknown } | null)?.error;
    } catch {
      // it is no node's
    }
    return isError(error) ? refusal(error, status) : this.#nonsense(`status ${status}`);
  }

  #broken(problem: string, cause?: unknown): UserError {
    const hint = "look at the head's log; the text can be asked for again";
    return new UserError("next_unreachable", `the head ${this.url} is gone: ${problem}`, hint, { cause });
  }

  #nonsense(what: string, cause?: unknown): UserError {
    const hint = "is --head the URL of a meshnet node that holds layer 0?";
    return new UserError("next_nonsense", `${this.url} answered ${what}`, hint, { cause });
  }
}

/** Whether somebody has been silent for too long. */
class Silence {
  isOver = false;
  readonly #timer: ReturnType<typeof setTimeout>;

  constructor(ms: number, end: () => void) {
    this.#timer = setTimeout(() => {
      this.isOver = true;
      end();
    }, ms);
  }

  heard(): void {
    this.#timer.refresh();
  }

  end(): void {
    clearTimeout(this.#timer);
  }
}

interface ErrorFields {
  readonly message: string;
  readonly code?: unknown;
  readonly type?: unknown;
}

const isError = (error: unknown): error is ErrorFields =>
  typeof (error as { message?: unknown } | null | undefined)?.message === "string";

/** An error of the API in this program's own words again: the hint stands behind the message. */
function refusal({ message, code, type }: ErrorFields, status: number | undefined): UserError {
  const at = message.lastIndexOf("; ");
  const [problem, hint] = at < 0 ? [message, "look at the head's log"] : [message.slice(0, at), message.slice(at + 2)];
  const said = `the head answers${status === undefined ? "" : ` ${status}`}: ${problem}`;
  return new UserError(codeOf(code, type), said, hint);
}

function codeOf(code: unknown, type: unknown): ErrorCode {
  const own = CODES[String(code)] ?? String(code);
  if (Object.hasOwn(ERRORS, own)) return own as ErrorCode;
  return type === "invalid_request_error" ? "malformed" : "next_nonsense";
}

/** What OpenAI calls otherwise. */
const CODES: Readonly<Record<string, ErrorCode>> = {
  context_length_exceeded: "context_exceeded",
  rate_limit_exceeded: "no_room",
  invalid_value: "malformed",
  unsupported_value: "not_supported",
  model_not_found: "not_found",
};

interface EventFields {
  readonly error?: unknown;
  readonly choices?: readonly { text?: unknown; delta?: { content?: unknown }; finish_reason?: unknown }[];
  readonly usage?: UsageFields | null;
}

interface UsageFields {
  readonly prompt_tokens?: unknown;
  readonly completion_tokens?: unknown;
  readonly prompt_tokens_details?: { readonly cached_tokens?: unknown } | null;
}

/** Undefined where it is nothing of this API. */
function parseEvent(data: string): TextEvent | { readonly error: ErrorFields } | undefined {
  let event: EventFields | null;
  try {
    event = JSON.parse(data);
  } catch {
    return undefined;
  }
  if (isError(event?.error)) return { error: event.error };
  if (!Array.isArray(event?.choices)) return undefined;
  const [choice] = event.choices as NonNullable<EventFields["choices"]>;
  const text = choice?.text ?? choice?.delta?.content ?? "";
  const finish = choice?.finish_reason ?? null;
  if (typeof text !== "string" || !(finish === null || finish === "stop" || finish === "length")) return undefined;
  return { text, finish, ...(event.usage && { usage: usageOf(event.usage) }) };
}

function usageOf({ prompt_tokens, completion_tokens, prompt_tokens_details }: UsageFields): TextUsage {
  const count = (value: unknown): number => (typeof value === "number" ? value : 0);
  return {
    prompt: count(prompt_tokens),
    completion: count(completion_tokens),
    cached: count(prompt_tokens_details?.cached_tokens),
  };
}
