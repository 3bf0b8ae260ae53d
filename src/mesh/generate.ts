import { UserError } from "../base/errors.ts";
import { readBody } from "../protocol/body.ts";
import { parseErrorReply, RemoteError } from "../protocol/error-reply.ts";
import { networkProblem } from "./network.ts";

export interface GenerateOptions {
  /** URL of the head. */
  readonly head: string;
  readonly prompt: string;
  readonly maxNewTokens: number;
  readonly signal?: AbortSignal;
}

export interface GeneratedToken {
  readonly id: number;
  /** What this token adds to the text: nothing while a character is incomplete. */
  readonly text: string;
}

/**
 * Drives a chain greedily, one call per token: the head tokenizes the prompt, and from then on gets the ids back with
 * each new one at their end. Ends at an end-of-text token, which is the last one given.
 *
 * Throws UserError `next_unreachable` or `next_nonsense`, or the RemoteError that a node of the chain answered.
 */
export async function* generate(options: GenerateOptions): AsyncGenerator<GeneratedToken> {
  const url = forwardUrl(options.head);
  let ids: readonly number[] | undefined;
  for (let made = 0; made < options.maxNewTokens; made++) {
    const body = ids ? { input_ids: [ids] } : { prompt: options.prompt };
    const reply = await call(url, body, options.signal).catch((error) => {
      const isFull = made > 0 && error instanceof RemoteError && error.body.code === "context_exceeded";
      throw isFull ? contextFull(made, error) : error;
    });
    ids = [...(ids ?? reply.promptIds), reply.id];
    yield { id: reply.id, text: reply.text };
    if (reply.isLast) return;
  }
}

const contextFull = (made: number, cause: RemoteError): UserError =>
  new UserError("context_exceeded", `the model's context is full after ${made} new tokens`, "lower --max-new-tokens", {
    cause,
  });

interface TokenReply extends GeneratedToken {
  /** What the head made of a prompt; empty where it was given ids. */
  readonly promptIds: readonly number[];
  readonly isLast: boolean;
}

/** JSON, and anything that may come instead of it. */
const MAX_REPLY_BYTES = 16 << 20;

function forwardUrl(head: string): string {
  const url = URL.parse(head);
  if (url?.protocol !== "http:" && url?.protocol !== "https:") {
    throw new UserError("bad_usage", `--head ${head} is not a URL`, "give the head's URL, as http://127.0.0.1:8001");
  }
  return new URL("forward", url.href.endsWith("/") ? url.href : `${url.href}/`).href;
}

async function call(url: string, body: object, signal?: AbortSignal): Promise<TokenReply> {
  let reply: Response;
  let text: string;
  try {
    const headers = { "Content-Type": "application/json" };
    reply = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal, redirect: "manual" });
    text = new TextDecoder().decode(await readBody(reply, MAX_REPLY_BYTES, "the reply"));
  } catch (cause) {
    if (signal?.aborted) throw cause;
    throw new UserError(
      "next_unreachable",
      `the head ${url} cannot be reached: ${networkProblem(cause)}`,
      "start it with meshnet node --shard-start 0, or correct --head",
      { cause },
    );
  }
  if (!reply.ok) throw parseErrorReply(reply.status, reply.headers, text) ?? nonsense(url, `status ${reply.status}`);
  const type = reply.headers.get("Content-Type") ?? "nothing";
  if (type.startsWith("application/octet-stream")) {
    throw new UserError(
      "next_nonsense",
      `the chain that begins at ${url} gives hidden states: it ends before the model's last layer`,
      "start its last node with --next and the URL of the node that holds the following layers",
    );
  }
  return parseReply(url, type, text);
}

function parseReply(url: string, type: string, text: string): TokenReply {
  let reply: Record<string, unknown> | undefined;
  try {
    reply = JSON.parse(text);
  } catch {
    throw nonsense(url, `${type}, and not a token`);
  }
  const first = (key: string): unknown => (Array.isArray(reply?.[key]) ? reply[key][0] : undefined);
  const [id, piece, promptIds = [], finish] = ["token_ids", "text", "prompt_token_ids", "finish"].map(first);
  const isToken = Number.isSafeInteger(id) && typeof piece === "string";
  if (!isToken || !Array.isArray(promptIds)) throw nonsense(url, `${type}, and not a token`);
  return { id: id as number, text: piece, promptIds, isLast: finish === "stop" };
}

const nonsense = (url: string, what: string): UserError =>
  new UserError("next_nonsense", `${url} answered ${what}`, "is --head the URL of a meshnet node that holds layer 0?");
