export interface Turn {
  readonly role: "user" | "assistant";
  readonly text: string;
}

export interface Settings {
  /** What stands before the conversation; empty: nothing. */
  readonly system: string;
  /** Undefined: the model's own. */
  readonly temperature: number | undefined;
  /** Of an answer. Undefined: the head decides. */
  readonly maxTokens: number | undefined;
  /** Where the context has less left than `maxTokens`, the answer has what is left; else that is refused. */
  readonly mayBeFewer: boolean;
}

/** A call of the head, by the path below the page's own. */
export interface Call {
  readonly path: string;
  readonly body: object;
}

/** Asks for the answer to the last turn. Without `isChat` the model goes on from the text of all turns. */
export function callFor(turns: readonly Turn[], settings: Settings, isChat: boolean): Call {
  const { system, temperature, maxTokens } = settings;
  const how = { temperature, max_tokens: maxTokens, stream: true, stream_options: { include_usage: true } };
  if (!isChat) return { path: "v1/completions", body: { prompt: textOf(turns, system), ...how } };
  const before = system === "" ? [] : [{ role: "system", content: system }];
  const messages = [...before, ...turns.map(({ role, text }) => ({ role, content: text }))];
  return { path: "v1/chat/completions", body: { messages, ...how } };
}

/** An answer goes on where the text before it ends; what the user adds to it begins a line. */
function textOf(turns: readonly Turn[], system: string): string {
  let text = system === "" ? "" : `${system}\n`;
  for (const [at, turn] of turns.entries()) text += turn.role === "user" && at > 0 ? `\n${turn.text}` : turn.text;
  return text;
}
