/** What a shell takes an end by Ctrl-C for: 128 and the number of SIGINT. */
export const EXIT_INTERRUPTED = 130;

/** Ctrl-C ends what has begun last; once more before something else has begun, it ends the process. */
export class Interrupts {
  #control = new AbortController();

  constructor() {
    process.on("SIGINT", () => {
      if (this.#control.signal.aborted) process.exit(EXIT_INTERRUPTED);
      this.#control.abort(new Error("Ctrl-C"));
    });
  }

  /** The signal of what begins now. */
  begin(): AbortSignal {
    if (this.#control.signal.aborted) this.#control = new AbortController();
    return this.#control.signal;
  }
}

/** The exit code of work that may end because its signal does. */
export async function unlessInterrupted(signal: AbortSignal, work: () => Promise<number>): Promise<number> {
  try {
    return await work();
  } catch (error) {
    if (signal.aborted && error === signal.reason) return EXIT_INTERRUPTED;
    throw error;
  }
}
