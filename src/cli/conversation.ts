import type { ChatTurn } from "../mesh/head-client.ts";

/** What a line means. */
export type Line =
  | { readonly kind: "message"; readonly text: string }
  | { readonly kind: "nothing" | "help" | "reset" | "exit" }
  | { readonly kind: "system"; readonly text: string }
  | { readonly kind: "unknown"; readonly command: string };

export const COMMAND_HELP = [
  "/system TEXT   instructions from now on; without TEXT there are none",
  "/reset         forget the conversation, but not the instructions",
  "/exit          end, as Ctrl-D does",
  "//…            a message that begins with a slash",
  "Ctrl-C ends an answer that is being written.",
].join("\n");

/** A word behind one slash at the beginning is a command; a path or two slashes are not. */
export function readLine(line: string): Line {
  const text = line.trim();
  if (text === "") return { kind: "nothing" };
  if (text.startsWith("//")) return { kind: "message", text: text.slice(1) };
  const [, command, rest = ""] = /^\/([a-z]+)(?:\s+(.*))?$/is.exec(text) ?? [];
  switch (command?.toLowerCase()) {
    case undefined:
      return { kind: "message", text };
    case "help":
    case "reset":
      return { kind: command!.toLowerCase() as "help" | "reset" };
    case "exit":
    case "quit":
      return { kind: "exit" };
    case "system":
      return { kind: "system", text: rest };
    default:
      return { kind: "unknown", command: `/${command}` };
  }
}

/** What was said, as the API wants it with each call: the head keeps nothing but its cache. */
export class Conversation {
  #system: string | undefined;
  #turns: ChatTurn[] = [];

  constructor(system?: string) {
    this.#system = system;
  }

  set system(text: string) {
    this.#system = text || undefined;
  }

  /** Whether nothing was said yet. */
  get isEmpty(): boolean {
    return this.#turns.length === 0;
  }

  /** The messages with a further one at their end. */
  with(content: string): ChatTurn[] {
    const system: ChatTurn[] = this.#system === undefined ? [] : [{ role: "system", content: this.#system }];
    return [...system, ...this.#turns, { role: "user", content }];
  }

  add(content: string, answer: string): void {
    this.#turns.push({ role: "user", content }, { role: "assistant", content: answer });
  }

  reset(): void {
    this.#turns = [];
  }
}
