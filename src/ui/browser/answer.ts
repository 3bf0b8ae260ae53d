import { type Call, callFor, type Settings, type Turn } from "./conversation.ts";
import { promptTokens, Refusal, type Part, streamAnswer } from "./head.ts";

/** What heads say where prompt and answer do not fit into the context together. */
export const CONTEXT_FULL = "context_length_exceeded";

export interface Asked {
  readonly turns: readonly Turn[];
  readonly settings: Settings;
  /** Whether the model has chats; else it goes on from the text. */
  readonly isChat: boolean;
  /** Tokens. */
  readonly maxContext: number;
}

/** Streams the answer to the last turn, which near the context's end is as long as what is left. Throws Refusal, or the signal's reason. */
export async function* answerTo(asked: Asked, signal: AbortSignal): AsyncGenerator<Part> {
  const { turns, settings, isChat } = asked;
  const call = callFor(turns, settings, isChat);
  try {
    yield* streamAnswer(call, signal);
  } catch (error) {
    if (!settings.mayBeFewer || !(error instanceof Refusal) || error.code !== CONTEXT_FULL) throw error;
    // In a chat it is left to the head, which takes no more than is left. For the text of a completion it would take 16.
    const left = isChat ? undefined : await tokensLeft(call, asked.maxContext, error, signal);
    yield* streamAnswer(callFor(turns, { ...settings, maxTokens: left }, isChat), signal);
  }
}

async function tokensLeft(call: Call, maxContext: number, refusal: Refusal, signal: AbortSignal): Promise<number> {
  const left = maxContext - (await promptTokens(call, signal));
  if (left < 1) throw refusal;
  return left;
}
