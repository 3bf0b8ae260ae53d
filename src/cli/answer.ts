import type { TextEvent, TextUsage } from "../mesh/head-client.ts";
import type { Stdout } from "./stdout.ts";

/** A text as it came. */
export interface Answer {
  readonly text: string;
  /** Null: it was broken off. */
  readonly finish: "stop" | "length" | null;
  /** Comes with the end only. */
  readonly usage: TextUsage | undefined;
  /** Milliseconds from the call to the first piece of text; undefined where none came. */
  readonly firstMs: number | undefined;
  /** From the call to the end. */
  readonly totalMs: number;
  /** Pieces that came together with the first one, itself included, and when the last of them did, from the call. */
  readonly head: { readonly pieces: number; readonly ms: number };
}

/** Pieces that come so soon after the first one waited with it somewhere, and say nothing of how fast the next ones come. */
const TOGETHER_MS = 5;

/**
 * Takes a text piece by piece and gives each to `say`. Where `signal` ends it early it is what had come until then; else an error is thrown.
 */
export async function takeAnswer(
  events: AsyncIterable<TextEvent>,
  {
    say = () => {},
    signal,
    now = () => performance.now(),
  }: { say?: (text: string) => void; signal: AbortSignal; now?: () => number },
): Promise<Answer> {
  const began = now();
  let text = "";
  let finish: Answer["finish"] = null;
  let usage: TextUsage | undefined;
  let firstMs: number | undefined;
  let lastMs = 0;
  let head = { pieces: 0, ms: 0 };
  try {
    for await (const event of events) {
      if (event.text !== "") {
        const ms = now() - began;
        firstMs ??= ms;
        if (ms - firstMs < TOGETHER_MS) head = { pieces: head.pieces + 1, ms };
        say(event.text);
      }
      text += event.text;
      if (event.finish !== null) lastMs = now() - began;
      finish = event.finish ?? finish;
      usage = event.usage ?? usage;
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    finish = null;
  }
  return { text, finish, usage, firstMs, totalMs: lastMs || now() - began, head };
}

/** Of the tokens after the first one, which waited for the prompt, and what came with it; undefined where there are none. */
export function tokensPerSecond({ usage, totalMs, head }: Answer): number | undefined {
  if (usage === undefined || head.pieces === 0) return undefined;
  const timed = usage.completion - head.pieces;
  if (timed < 1 || totalMs - head.ms < TOGETHER_MS) return undefined;
  return (timed * 1000) / (totalMs - head.ms);
}

/** `24 tokens, the first after 0.12 s, then 35.2 tokens/s`. */
export function describeSpeed(answer: Answer): string {
  const { usage, firstMs, finish } = answer;
  const rate = tokensPerSecond(answer);
  return [
    finish === null ? "stopped" : usage && `${usage.completion} ${usage.completion === 1 ? "token" : "tokens"}`,
    firstMs !== undefined && `the first after ${(firstMs / 1000).toFixed(2)} s`,
    rate !== undefined && `then ${rate.toFixed(1)} tokens/s`,
  ]
    .filter((part) => typeof part === "string")
    .join(", ");
}

/** For programs: docs/generate.md. */
export function answerJson(answer: Answer) {
  const { text, finish, usage, firstMs, totalMs } = answer;
  const rounded = (value: number | undefined) => (value === undefined ? null : Number(value.toFixed(1)));
  return {
    text,
    finish_reason: finish ?? "interrupted",
    usage: usage
      ? { prompt_tokens: usage.prompt, completion_tokens: usage.completion, cached_tokens: usage.cached }
      : null,
    timing: {
      first_token_ms: rounded(firstMs),
      total_ms: rounded(totalMs),
      tokens_per_second: rounded(tokensPerSecond(answer)),
    },
  };
}

/** Prints what a model writes: on a terminal, which it must not steer, control characters are shown as pictures of them. */
export const printer = ({ print }: Stdout, isTerminal = process.stdout.isTTY === true): ((text: string) => void) =>
  isTerminal ? (text) => print(withoutControls(text)) : print;

export const withoutControls = (text: string): string =>
  text.replace(/\p{Cc}/gu, (char) => {
    const code = char.charCodeAt(0);
    if (char === "\n" || char === "\t") return char;
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "\u2421";
  });
