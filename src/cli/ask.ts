import { createInterface } from "node:readline";
import { UserError } from "../base/errors.ts";

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

/** What comes on stdin, line by line. Throws UserError `bad_usage` at the first line that is no UTF-8. */
export async function* lines(chunks: AsyncIterable<Uint8Array> = process.stdin): AsyncGenerator<string> {
  let number = 0;
  for await (const bytes of byteLines(chunks)) {
    number++;
    let line: string;
    try {
      line = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch (cause) {
      throw new UserError("bad_usage", `line ${number} of stdin is not text in UTF-8`, "convert it first", { cause });
    }
    yield line.replace(/\r$/, "");
  }
}

/** Line breaks end lines, and are not part of them; so does the end. */
async function* byteLines(chunks: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  let parts: Uint8Array[] = [];
  for await (const chunk of chunks) {
    let from = 0;
    for (let to = chunk.indexOf(LINE_FEED); to >= 0; to = chunk.indexOf(LINE_FEED, from)) {
      yield Buffer.concat([...parts, chunk.subarray(from, to)]);
      parts = [];
      from = to + 1;
    }
    if (from < chunk.length) parts.push(chunk.slice(from));
  }
  if (parts.length > 0) yield Buffer.concat(parts);
}

const LINE_FEED = 10;
