import { createInterface } from "node:readline";

/** A line that a person types at a terminal; undefined at Ctrl-D, or at the second Ctrl-C. The first one clears the line. */
export function ask(prompt: string, history: string[]): Promise<string | undefined> {
  const { promise, resolve } = Promise.withResolvers<string | undefined>();
  // For each question anew: while nothing is asked the terminal is as always, and Ctrl-C a signal.
  const typed = createInterface({ input: process.stdin, output: process.stdout, prompt, history: [...history] });
  let isWarned = false;
  typed.on("line", (line) => {
    resolve(line);
    typed.close();
  });
  typed.on("SIGINT", () => {
    if (isWarned && typed.line === "") return typed.close();
    isWarned = true;
    process.stdout.write(typed.line === "" ? "\n(Ctrl-C once more, or Ctrl-D, ends)\n" : "\n");
    typed.write(null, { ctrl: true, name: "e" });
    typed.write(null, { ctrl: true, name: "u" });
    typed.prompt();
  });
  typed.on("close", () => resolve(undefined));
  typed.prompt();
  return promise;
}

/** What comes on stdin, line by line. */
export const lines = (): AsyncIterable<string> => createInterface({ input: process.stdin, crlfDelay: Infinity });
