/** An event of a stream, as JSON. */
export interface StreamEvent {
  choices: {
    index: number;
    text?: string;
    delta?: { role?: string; content?: string };
    finish_reason: string | null;
    logprobs: unknown;
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number } | null;
  error?: OpenAiErrorShape;
}

export interface Completion {
  id: string;
  model: string;
  choices: { index: number; text: string; finish_reason: string; logprobs: CompletionLogprobs | null }[];
  usage: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details: { cached_tokens: number } };
}

export interface CompletionLogprobs {
  tokens: string[];
  token_logprobs: (number | null)[];
  top_logprobs: (Record<string, number> | null)[] | null;
  text_offset: number[];
}

export interface OpenAiErrorShape {
  message: string;
  type: string;
  param: string | null;
  code: string | null;
}

export const ask = (url: string, path: string, body: unknown, init: RequestInit = {}): Promise<Response> =>
  fetch(new URL(`v1/${path}`, url), {
    method: "POST",
    body: typeof body === "string" ? body : JSON.stringify(body),
    ...init,
  });

export async function complete(url: string, body: object): Promise<Completion> {
  const reply = await ask(url, "completions", body);
  if (reply.status !== 200) throw new Error(`${reply.status}: ${await reply.text()}`);
  return (await reply.json()) as Completion;
}

export const openAiErrorOf = async (reply: Response): Promise<OpenAiErrorShape> =>
  ((await reply.json()) as { error: OpenAiErrorShape }).error;

/** All blocks of a stream, as they were written. */
export const blocksOf = async (reply: Response): Promise<string[]> =>
  (await reply.text()).split("\n\n").filter((block) => block !== "");

/** The events of a stream that ended with `[DONE]`. */
export async function eventsOf(reply: Response): Promise<StreamEvent[]> {
  const data = (await blocksOf(reply)).filter((block) => !block.startsWith(":")).map((block) => block.slice(6));
  if (data.pop() !== "[DONE]") throw new Error("the stream did not end with [DONE]");
  return data.map((text) => JSON.parse(text) as StreamEvent);
}

/** The texts of a stream's choices. */
export function textsOf(events: readonly StreamEvent[]): string[] {
  const texts: string[] = [];
  for (const { index, text, delta } of events.flatMap(({ choices }) => choices)) {
    texts[index] = (texts[index] ?? "") + (text ?? delta?.content ?? "");
  }
  return texts;
}
