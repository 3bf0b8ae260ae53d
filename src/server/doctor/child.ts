import type { Environment } from "../../hub/settings.ts";

/** How a probe in a process of its own ended. */
export interface ChildEnd<Event> {
  /** What it said before it ended. */
  readonly events: readonly Event[];
  /** Undefined where it ended well. */
  readonly problem: string | undefined;
  /** Lines that native code wrote on stderr. */
  readonly stderr: readonly string[];
}

export interface ChildOptions {
  /** The words that start this program again. */
  readonly self: readonly string[];
  readonly env: Environment;
  /** Without an event for so long it hangs, and is ended. */
  readonly silenceMs: number;
}

/** Nobody but the system does that to a probe, and it does when memory runs out. */
export const KILLED = "was killed, most likely for lack of memory (SIGKILL)";
/** Of the words in `problem`: the process itself ended, or had to be. */
export const DEADLY = /crashed|was killed|come back|ended the process/;

/** The hidden command of the probes. */
export const PROBE_COMMAND = "doctor-probe";

/**
 * Runs a probe in a process of its own: a driver that crashes or hangs takes that process with it, and no other. The
 * child says what it found as JSON, an event to a line, each as soon as it knows it.
 */
export async function runProbe<Event>(request: object, options: ChildOptions): Promise<ChildEnd<Event>> {
  const child = Bun.spawn([...options.self, PROBE_COMMAND, JSON.stringify(request)], {
    env: { ...options.env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const events: Event[] = [];
  let isSilent = false;
  const end = () => {
    isSilent = true;
    child.kill("SIGKILL"); // one that hangs in native code hears nothing else
  };
  let timer = setTimeout(end, options.silenceMs);
  const stderr = new Response(child.stderr).text();
  for await (const line of linesOf(child.stdout)) {
    const event = parsed<Event>(line);
    if (event === undefined) continue; // a driver that writes on stdout
    events.push(event);
    clearTimeout(timer);
    timer = setTimeout(end, options.silenceMs);
  }
  const code = await child.exited;
  clearTimeout(timer);
  return {
    events,
    problem: isSilent
      ? `did not come back within ${options.silenceMs / 1000} s`
      : child.signalCode === "SIGKILL"
        ? KILLED
        : child.signalCode !== null
          ? `crashed (${child.signalCode})`
          : code !== 0
            ? `ended the process (exit code ${code})`
            : undefined,
    stderr: (await stderr).split("\n").filter((line) => line.trim() !== ""),
  };
}

async function* linesOf(stream: ReadableStream<Uint8Array<ArrayBuffer>>): AsyncGenerator<string> {
  let rest = "";
  for await (const chunk of stream.pipeThrough(new TextDecoderStream())) {
    const parts = (rest + chunk).split("\n");
    rest = parts.pop()!;
    yield* parts;
  }
}

function parsed<Event>(line: string): Event | undefined {
  try {
    const value: unknown = JSON.parse(line);
    return typeof value === "object" && value !== null && "event" in value ? (value as Event) : undefined;
  } catch {
    return undefined;
  }
}
