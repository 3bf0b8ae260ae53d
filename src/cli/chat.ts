import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import type { ChatTurn, HeadClient, TextEvent, TextOptions } from "../mesh/head-client.ts";
import { type Answer, answerJson, describeSpeed, printer, takeAnswer } from "./answer.ts";
import { lines, Prompter } from "./ask.ts";
import { defineCommand } from "./command.ts";
import { COMMAND_HELP, Conversation, type Line, readLine } from "./conversation.ts";
import { EXIT_INTERRUPTED, Interrupts, unlessInterrupted } from "./interrupt.ts";
import { checkHeadArgs, headFlags, openHead } from "./open-head.ts";
import { tell } from "./stderr.ts";
import { openStdout, type Stdout } from "./stdout.ts";
import { greedyUnlessAsked, textFlags, textOptions } from "./text-flags.ts";

const flags = {
  system: { type: "string", valueHint: "TEXT", description: "Instructions that stand before the conversation" },
  ...textFlags,
  "max-new-tokens": {
    ...textFlags["max-new-tokens"],
    description: "The most tokens of an answer (default: the model's own; never more than the context has left)",
  },
  json: { type: "boolean", default: false, description: "Print each answer as a line of JSON" },
  ...headFlags,
} satisfies ArgsDef;

/** What all answers of a chat need. */
interface Chat {
  readonly client: HeadClient;
  readonly model: string | null;
  readonly options: TextOptions;
  readonly conversation: Conversation;
  readonly stdout: Stdout;
  readonly interrupts: Interrupts;
  /** Rejects when the model cannot go on. */
  readonly failure: Promise<never>;
  readonly json: boolean;
  readonly quiet: boolean;
}

/** `meshnet chat`: a conversation, at a terminal or line by line from stdin. */
export const chat = defineCommand({
  name: "chat",
  description: "Have a conversation",
  args: flags,
  list: "stop",
  examples: [
    "meshnet chat --head http://127.0.0.1:8001",
    'meshnet chat --model-id HuggingFaceTB/SmolLM2-135M-Instruct --system "Answer in one sentence."',
    "meshnet chat --head http://127.0.0.1:8001 --json < questions.txt",
  ],
  async run(args, stops) {
    const options = textOptions(args, stops);
    checkHeadArgs(args);
    const stdout = openStdout();
    const interrupts = new Interrupts();
    const signal = interrupts.begin();
    return unlessInterrupted(signal, async () => {
      await using head = await openHead(args, { signal, sessions: 1 });
      const { client, failure } = head;
      const info = await client.headInfo(signal);
      if (info?.texts?.chat === false) throw noTemplate(info.model_id);
      const model = info?.model_id ?? null;
      const { json, quiet, system } = args;
      const said = { options: greedyUnlessAsked(options, info), conversation: new Conversation(system) };
      const parts = { client, model, ...said, stdout, interrupts, failure, json, quiet };
      const isTerminal = process.stdin.isTTY === true && process.stdout.isTTY === true;
      return await (isTerminal ? converse(parts) : answerLines(parts));
    });
  },
});

/** With a person at a terminal: what goes wrong is said, and the conversation goes on. */
async function converse(chat: Chat): Promise<number> {
  const { stdout, quiet, model, client } = chat;
  if (!quiet) tell(`${model ?? client.url}: /help tells the commands, Ctrl-D ends`);
  const history: string[] = [];
  const prompter = new Prompter();
  for (;;) {
    const typed = await Promise.race([prompter.ask("> ", history), chat.failure]);
    if (typed === undefined) {
      stdout.print("\n");
      return 0;
    }
    if (typed.trim() !== "") history.unshift(typed);
    const line = readLine(typed);
    if (line.kind === "exit") return 0;
    if (line.kind === "unknown") tell(`there is no ${line.command}\n${COMMAND_HELP}`);
    else if (line.kind !== "message") obey(line, chat);
    else {
      const given = await answer(line.text, chat).catch((error: unknown) => sayProblem(error, chat));
      if (given?.finish === null) prompter.forget(); // Ctrl-C
    }
  }
}

/** A message per line of stdin, up to the first thing that goes wrong. */
async function answerLines(chat: Chat): Promise<number> {
  for await (const text of lines()) {
    const line = readLine(text);
    if (line.kind === "exit") return 0;
    if (line.kind === "unknown") {
      throw new UserError(
        "bad_usage",
        `there is no ${line.command}`,
        "write //… for a message that begins with a slash",
      );
    }
    if (line.kind !== "message") obey(line, chat);
    else if ((await answer(line.text, chat)).finish === null) return EXIT_INTERRUPTED;
  }
  return 0;
}

function obey(line: Exclude<Line, { kind: "message" | "unknown" | "exit" }>, { conversation }: Chat): void {
  switch (line.kind) {
    case "nothing":
      return;
    case "help":
      return tell(COMMAND_HELP);
    case "reset":
      return conversation.reset();
    case "system":
      conversation.system = line.text;
  }
}

async function answer(message: string, chat: Chat): Promise<Answer> {
  const { model, conversation, stdout, interrupts, failure, json, quiet } = chat;
  const signal = interrupts.begin();
  const texts = answerTo(conversation.with(message), chat, signal);
  const given = await Promise.race([json ? takeAnswer(texts, { signal }) : say(texts), failure]);
  // What was broken off has been read, and can be talked about.
  if (given.finish !== null || given.text !== "") conversation.add(message, given.text);
  if (json) stdout.print(`${JSON.stringify({ model, message, ...answerJson(given) })}\n`);
  await stdout.flush();
  if (!quiet) tell(describeSpeed(given));
  return given;

  async function say(pieces: typeof texts): Promise<Answer> {
    const print = printer(stdout);
    let said = false;
    const say = (piece: string) => {
      print(piece);
      said = true;
    };
    try {
      const given = await takeAnswer(pieces, { say, signal });
      said = true; // an answer without a word is a line as well
      return given;
    } finally {
      if (said) stdout.print("\n"); // also after half an answer: what follows has a line of its own
    }
  }
}

/** As many tokens as asked for, or what the context has left where that is less. */
async function* answerTo(
  messages: readonly ChatTurn[],
  { client, options }: Chat,
  signal: AbortSignal,
): AsyncGenerator<TextEvent> {
  try {
    yield* client.text({ messages }, options, signal);
  } catch (error) {
    const isFull = error instanceof UserError && error.code === "context_exceeded"; // before a text has begun
    if (!isFull || options.max_tokens === undefined) throw error;
    yield* client.text({ messages }, { ...options, max_tokens: undefined }, signal); // the head knows what is left
  }
}

function sayProblem(error: unknown, { conversation }: Chat): undefined {
  if (!(error instanceof UserError)) throw error;
  const isFull = error.code === "context_exceeded" && !conversation.isEmpty;
  tell(`${error.message}\n  ${error.hint}${isFull ? ", or begin a new conversation with /reset" : ""}`);
}

const noTemplate = (model: string): UserError =>
  new UserError(
    "not_supported",
    `${model} has no chat template, so there is no way to write down a conversation for it`,
    "take a model that was made for conversations (its name often says Instruct or Chat), or continue a text with meshnet generate",
  );
