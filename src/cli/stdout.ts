import { readFileSync } from "node:fs";
import { tell } from "./stderr.ts";

export interface Stdout {
  print(text: string): void;
  /** Resolves when all that was printed is out of this process. */
  flush(): Promise<void>;
}

type WriteError = Error & { readonly code?: string };

/** Where a text goes as it comes. Nobody reads on (`| head`), which is no fault; or it cannot be written: both end the process. */
export function openStdout(): Stdout {
  const write = openWriter(() => process.exit(0));
  let written: Promise<unknown> = Promise.resolve();
  return {
    print: (text) => void (written = Promise.all([written, write(text)])),
    flush: async () => void (await written),
  };
}

/**
 * Where results go, each with a line break; what it gives resolves when one is out of this process. Nobody reads on (`| head`):
 * the exit code is the command's all the same. It cannot be written: the process ends.
 */
export function openResults(): (text: string) => Promise<void> {
  let hasReader = true;
  const write = openWriter(() => (hasReader = false));
  const hasColour = process.stdout.isTTY && !process.env["NO_COLOR"];
  return async (text) => {
    if (hasReader) await write(`${hasColour ? text : Bun.stripANSI(text)}\n`);
  };
}

function openWriter(onUnread: () => void): (text: string) => Promise<void> {
  beOpen();
  const onError = (error: WriteError) => (error.code === "EPIPE" ? onUnread() : lose(error.message));
  process.stdout.on("error", onError); // also of what readline writes
  return (text) =>
    new Promise((resolve) => {
      process.stdout.write(text, (error?: WriteError | null) => {
        if (error) onError(error);
        resolve();
      });
    });
}

function lose(problem: string): never {
  const hint = "make room there, or send it somewhere else";
  tell(`meshnet: what there is to tell cannot be written to stdout: ${problem}\n  ${hint}`);
  process.exit(1);
}

/** Bun puts /dev/null in the place of a stdout that is closed (`>&-`), where everything would be lost without a word. */
function beOpen(): void {
  if (!isClosed()) return;
  tell(
    "meshnet: stdout is closed, and what there is to tell would be lost\n  send it somewhere: > FILE, or > /dev/null",
  );
  process.exit(1);
}

const O_CLOEXEC = 0o2000000;

/** What a process was given is open across exec; what it opened itself in that place is not. Known on Linux only. */
function isClosed(): boolean {
  try {
    const [, flags = "0"] = /^flags:\s*([0-7]+)$/m.exec(readFileSync("/proc/self/fdinfo/1", "utf8")) ?? [];
    return (Number.parseInt(flags, 8) & O_CLOEXEC) !== 0;
  } catch {
    return false;
  }
}
