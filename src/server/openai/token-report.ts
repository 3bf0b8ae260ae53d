import type { Logprobs } from "../../protocol/reply.ts";
import type { Tokenizer } from "../../tokenizer/tokenizer.ts";

/** What the API tells of one token. */
export interface TokenReport {
  readonly id: number;
  /** Null: nothing came before it. */
  readonly logprobs: Logprobs | null;
  /** Characters (code points) of the choice's text before it. */
  readonly offset: number;
}

interface ChatToken {
  readonly token: string;
  readonly logprob: number;
  readonly bytes: number[];
}

/** `logprobs` of a chat's choice. */
export function chatLogprobs(reports: readonly TokenReport[], tokenizer: Tokenizer) {
  const entry = (id: number, logprob: number): ChatToken => ({
    token: tokenText(id, tokenizer),
    logprob: finite(logprob),
    bytes: [...bytesOfToken(id, tokenizer)],
  });
  const content = reports.flatMap(({ id, logprobs }) => {
    if (!logprobs) return [];
    return [{ ...entry(id, logprobs.logprob), top_logprobs: logprobs.top.map((top) => entry(top.id, top.logprob)) }];
  });
  return { content, refusal: null };
}

/** `logprobs` of a completion's choice. `top`: how many were asked for; the token itself is always among them. */
export function completionLogprobs(reports: readonly TokenReport[], top: number, tokenizer: Tokenizer) {
  const text = (id: number) => tokenText(id, tokenizer);
  return {
    tokens: reports.map(({ id }) => text(id)),
    token_logprobs: reports.map(({ logprobs }) => logprobs && finite(logprobs.logprob)),
    top_logprobs: top === 0 ? null : reports.map(({ id, logprobs }) => logprobs && topOf(id, logprobs, text)),
    text_offset: reports.map(({ offset }) => offset),
  };
}

function topOf(id: number, { logprob, top }: Logprobs, text: (id: number) => string): Record<string, number> {
  const all = [...top, { id, logprob }];
  return Object.fromEntries(all.map((token) => [text(token.id), finite(token.logprob)]));
}

/** JSON has no infinity. OpenAI's number for what cannot be. */
const finite = (logprob: number): number => Math.max(logprob, -9999);

/** A token as text. One that is a part of a character only is written as OpenAI does: `bytes:\xf0\x9f`. */
export function tokenText(id: number, tokenizer: Tokenizer): string {
  const bytes = tokenizer.tokenBytes?.(id);
  if (!bytes) return tokenizer.decode([id]);
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return `bytes:${Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
  }
}

const bytesOfToken = (id: number, tokenizer: Tokenizer): Uint8Array =>
  tokenizer.tokenBytes?.(id) ?? new TextEncoder().encode(tokenizer.decode([id]));

/** Code points. */
export function lengthOf(text: string): number {
  let length = 0;
  for (const _ of text) length++;
  return length;
}
