import type { ChainInfo } from "../../protocol/chain.ts";
import type { NodeInfo } from "../../protocol/info.ts";
import type { Call } from "./conversation.ts";
import { eventData } from "./event-stream.ts";

/** Why there is no answer, or not all of it, in the head's own words. */
export class Refusal extends Error {
  constructor(
    message: string,
    readonly code: string,
  ) {
    super(message);
  }
}

/** A part of an answer. */
export interface Part {
  readonly text: string;
  /** Why the answer ends here. */
  readonly finish: string | null;
  /** Tokens: with the last part. */
  readonly usage: Usage | undefined;
}

export interface Usage {
  readonly prompt_tokens: number;
  readonly completion_tokens: number;
}

/** What a head may send in one event, of chats and of completions. */
interface Event {
  readonly choices?: readonly {
    readonly text?: string;
    readonly delta?: { readonly content?: string };
    readonly finish_reason?: string | null;
  }[];
  readonly usage?: Usage | null;
  readonly error?: ErrorBody;
}

interface ErrorBody {
  readonly message?: string;
  readonly code?: string | null;
  readonly hint?: string;
}

/** Streams an answer. Throws Refusal, or the signal's reason. */
export async function* streamAnswer({ path, body }: Call, signal: AbortSignal): AsyncGenerator<Part> {
  const reply = await post(path, body, signal);
  try {
    for await (const data of eventData(reply.body!)) {
      if (data === "[DONE]") return;
      const { choices, usage, error }: Event = JSON.parse(data);
      if (error) throw refusalOf(error, reply.status);
      const choice = choices?.[0];
      yield {
        text: choice?.delta?.content ?? choice?.text ?? "",
        finish: choice?.finish_reason ?? null,
        usage: usage ?? undefined,
      };
    }
  } catch (error) {
    if (signal.aborted || error instanceof Refusal) throw error;
    throw new Refusal(`The answer broke off: ${wordsOf(error)}`, "broken_off");
  }
  throw new Refusal("The answer broke off. The node may have been stopped.", "broken_off");
}

/** How many tokens the prompt of a completion has: none is made of it. Throws Refusal, or the signal's reason. */
export async function promptTokens({ path, body }: Call, signal: AbortSignal): Promise<number> {
  const reply = await post(path, { ...body, max_tokens: 0, stream: false, stream_options: undefined }, signal);
  const { usage }: Event = await reply.json();
  return usage!.prompt_tokens;
}

/** What the head is. Throws Refusal, or the signal's reason. */
export const headInfo = (signal: AbortSignal): Promise<NodeInfo> => json("info", signal);

/** What all nodes do. Throws Refusal, or the signal's reason. */
export const chainInfo = (signal: AbortSignal): Promise<ChainInfo> => json("chain", signal);

async function json<T>(path: string, signal: AbortSignal): Promise<T> {
  const reply = await ask(path, { signal });
  if (!reply.ok) throw refusalOf(await errorOf(reply), reply.status);
  return reply.json();
}

async function post(path: string, body: object, signal: AbortSignal): Promise<Response> {
  const headers = { "Content-Type": "application/json" };
  const reply = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!reply.ok) throw refusalOf(await errorOf(reply), reply.status);
  return reply;
}

async function ask(path: string, init: RequestInit): Promise<Response> {
  try {
    return await fetch(path, { ...init, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new Refusal("The node cannot be reached. Is it still running?", "unreachable");
  }
}

async function errorOf(reply: Response): Promise<ErrorBody> {
  try {
    const { error }: Event = await reply.json();
    return error ?? {};
  } catch {
    return {}; // a proxy's page, say: the status has to do
  }
}

function refusalOf({ message, code, hint }: ErrorBody, status: number): Refusal {
  const text = [message ?? `The node answered ${status}`, hint].filter((part) => part !== undefined).join("; ");
  return new Refusal(text, code ?? String(status));
}

const wordsOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));
