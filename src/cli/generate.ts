import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import type { HeadClient, TextEvent, TextOptions } from "../mesh/head-client.ts";
import { type Answer, answerJson, describeSpeed, printer, takeAnswer } from "./answer.ts";
import { defineCommand } from "./command.ts";
import { EXIT_INTERRUPTED, Interrupts, unlessInterrupted } from "./interrupt.ts";
import { checkHeadArgs, headFlags, openHead } from "./open-head.ts";
import { tell } from "./stderr.ts";
import { openStdout, type Stdout } from "./stdout.ts";
import { greedyUnlessAsked, readText, textFlags, textOptions } from "./text-flags.ts";

const USUAL_TOKENS = 64;

const flags = {
  prompt: { type: "positional", required: false, description: "The text to continue; - reads it from stdin" },
  "prompt-file": { type: "string", valueHint: "FILE", description: "A file with the text to continue" },
  ...textFlags,
  "max-new-tokens": {
    ...textFlags["max-new-tokens"],
    description: `The most tokens to make (default: ${USUAL_TOKENS}, or what the context has left)`,
  },
  ...headFlags,
} satisfies ArgsDef;

/** `meshnet generate`: prints what a model makes of a prompt, as it comes. */
export const generate = defineCommand({
  name: "generate",
  description: "Continue a prompt",
  args: flags,
  list: "stop",
  examples: [
    'meshnet generate "This program is free" --head http://127.0.0.1:8001 --max-new-tokens 24',
    'meshnet generate "Once upon a time" --model-id openai-community/gpt2 --temperature 0.8 --top-p 0.9 --seed 1',
    "meshnet generate - --head http://127.0.0.1:8001 --stop '.' --json < letter.txt",
  ],
  async run(args, stops) {
    const options = textOptions(args, stops);
    checkHeadArgs(args);
    const prompt = await promptOf(args);
    const stdout = openStdout();
    const signal = new Interrupts().begin();
    return unlessInterrupted(signal, async () => {
      await using head = await openHead(args, { signal, sessions: 1 });
      const info = await head.client.headInfo(signal);
      const texts = textAfter(prompt, head.client, greedyUnlessAsked(options, info), signal);
      const answering = args.json ? takeAnswer(texts, { signal }) : sayText(prompt, texts, signal, stdout);
      const answer = await Promise.race([answering, head.failure]);
      const json = { model: info?.model_id ?? null, prompt, ...answerJson(answer) };
      if (args.json) stdout.print(`${JSON.stringify(json)}\n`);
      await stdout.flush();
      if (!args.quiet) tell(describeSpeed(answer));
      return signal.aborted ? EXIT_INTERRUPTED : 0;
    });
  },
});

/** As many tokens as asked for; by default the usual number, or what the context has left where that is less. */
async function* textAfter(
  prompt: string,
  client: HeadClient,
  options: TextOptions,
  signal: AbortSignal,
): AsyncGenerator<TextEvent> {
  const { max_tokens = USUAL_TOKENS } = options;
  try {
    yield* client.text({ prompt }, { ...options, max_tokens }, signal);
  } catch (error) {
    const isFull = error instanceof UserError && error.code === "context_exceeded"; // before a text has begun
    if (!isFull || options.max_tokens !== undefined) throw error;
    const left = await tokensLeft(prompt, client, signal);
    yield* client.text({ prompt }, { ...options, max_tokens: left }, signal); // without a number it is the head's to say
  }
}

/** By the head's own count of the prompt's tokens, for which nothing is computed. Undefined where there are none, or nobody tells. */
async function tokensLeft(prompt: string, client: HeadClient, signal: AbortSignal): Promise<number | undefined> {
  const info = await client.info(signal);
  let left: number | undefined;
  try {
    for await (const { usage } of client.text({ prompt }, { max_tokens: 0 }, signal)) {
      if (info && usage) left = info.max_context - usage.prompt;
    }
  } catch (error) {
    if (!(error instanceof UserError && error.code === "context_exceeded")) throw error;
  }
  return left !== undefined && left > 0 ? left : undefined;
}

/** Prints the prompt as soon as its continuation begins, and that as it comes. */
async function sayText(
  prompt: string,
  texts: AsyncIterable<TextEvent>,
  signal: AbortSignal,
  stdout: Stdout,
): Promise<Answer> {
  const print = printer(stdout);
  let said = false;
  const say = (piece: string) => {
    print(said ? piece : prompt + piece);
    said = true;
  };
  try {
    const answer = await takeAnswer(texts, { say, signal });
    if (!said && answer.finish !== null) say(""); // the model has nothing to add
    return answer;
  } finally {
    if (said) stdout.print("\n"); // also after half a text: the error has a line of its own
  }
}

/** Throws UserError `bad_usage` unless exactly one place has a prompt. */
async function promptOf({ prompt, "prompt-file": file }: { prompt?: string; "prompt-file"?: string }): Promise<string> {
  if (prompt !== undefined && file !== undefined) {
    throw new UserError("bad_usage", "both a prompt and --prompt-file are given", "give one of them");
  }
  const text =
    file !== undefined ? await readText(file, "--prompt-file") : prompt === "-" ? await readText("-", "") : prompt;
  if (text === undefined) {
    throw new UserError(
      "bad_usage",
      "there is no prompt",
      'give it as a word in quotes ("Once upon a time"), as - for stdin, or with --prompt-file',
    );
  }
  return text;
}
