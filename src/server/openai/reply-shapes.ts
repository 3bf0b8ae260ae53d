import type { Tokenizer } from "../../tokenizer/tokenizer.ts";
import type { Piece, Usage } from "./text-maker.ts";
import type { TextRequest } from "./text-request.ts";
import { chatLogprobs, completionLogprobs, type TokenReport } from "./token-report.ts";

/** What every reply and every event of one call says. */
export interface Heading {
  readonly id: string;
  /** Seconds since 1970. */
  readonly created: number;
  readonly model: string;
  /** Same fingerprint, same bits. */
  readonly system_fingerprint: string;
}

/** One text, whole. */
export interface FinishedText {
  readonly index: number;
  text: string;
  readonly reports: TokenReport[];
  finish: "stop" | "length";
}

/** How an API writes texts, whole and in pieces. */
export interface Shape {
  readonly prefix: string;
  readonly whole: string;
  readonly chunk: string;
  /** What comes before the first piece of a text. */
  opening(index: number): object | undefined;
  /** The choices of the events that a piece makes. */
  pieces(piece: Piece): object[];
  choice(text: FinishedText): object;
}

export function completionShape({ sampling }: TextRequest, tokenizer: Tokenizer): Shape {
  const top = sampling.logprobs;
  const choice = ({ index, text, reports }: Pick<Piece, "index" | "text" | "reports">, finish: Piece["finish"]) => ({
    index,
    text,
    logprobs: top === undefined ? null : completionLogprobs(reports, top, tokenizer),
    finish_reason: finish,
  });
  return {
    prefix: "cmpl",
    whole: "text_completion",
    chunk: "text_completion",
    opening: () => undefined,
    pieces: (piece) => [choice(piece, piece.finish)],
    choice: (text) => choice(text, text.finish),
  };
}

export function chatShape({ sampling }: TextRequest, tokenizer: Tokenizer): Shape {
  const logprobs = (reports: readonly TokenReport[]) =>
    sampling.logprobs === undefined ? null : chatLogprobs(reports, tokenizer);
  const event = (index: number, delta: object, reports: readonly TokenReport[], finish: Piece["finish"]) => ({
    index,
    delta,
    logprobs: reports.length > 0 ? logprobs(reports) : null,
    finish_reason: finish,
  });
  return {
    prefix: "chatcmpl",
    whole: "chat.completion",
    chunk: "chat.completion.chunk",
    opening: (index) => event(index, { role: "assistant", content: "", refusal: null }, [], null),
    pieces({ index, text, reports, finish }) {
      const hasText = text !== "" || reports.length > 0;
      return [
        ...(hasText ? [event(index, { content: text }, reports, null)] : []),
        ...(finish === null ? [] : [event(index, {}, [], finish)]),
      ];
    },
    choice: ({ index, text, reports, finish }) => ({
      index,
      message: { role: "assistant", content: text, refusal: null },
      logprobs: logprobs(reports),
      finish_reason: finish,
    }),
  };
}

export const usageOf = ({ prompt, completion, cached }: Usage) => ({
  prompt_tokens: prompt,
  completion_tokens: completion,
  total_tokens: prompt + completion,
  prompt_tokens_details: { cached_tokens: cached },
});
