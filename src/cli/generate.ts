import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import type { TextEvent } from "../mesh/head-client.ts";
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
  "max-new-tokens": { ...textFlags["max-new-tokens"], default: `${USUAL_TOKENS}` },
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
      const texts = head.client.text({ prompt }, greedyUnlessAsked(options, info), signal);
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
