import { UserError } from "../base/errors.ts";

/**
 * Calls wait here for the device, which runs one at a time. It is bounded, so that a node that cannot keep up says so
 * early; and a call whose caller has gone meanwhile is never run.
 */
export class Queue {
  readonly #maxWaiting: number;
  readonly #waiting: (() => void)[] = [];
  #runningSince: number | undefined;

  constructor(maxWaiting: number) {
    this.#maxWaiting = maxWaiting;
  }

  /** How long the call that runs has been running; 0 where none does. */
  get busyMs(): number {
    return this.#runningSince === undefined ? 0 : Math.max(performance.now() - this.#runningSince, Number.MIN_VALUE);
  }

  /** Throws UserError `no_room` where a further call would be one too many. */
  checkRoom(): void {
    if (this.#runningSince === undefined || this.#waiting.length < this.#maxWaiting) return;
    throw new UserError(
      "no_room",
      `${this.#waiting.length} calls are waiting for this node, and it lets ${this.#maxWaiting} wait`,
      "try again in a moment",
    );
  }

  /**
   * Runs `work` when its turn has come. Rejects with the signal's reason as soon as that is aborted: work that waits is
   * dropped then, work that runs keeps its turn until it ends: it looks at the signal itself.
   */
  async run<T>(work: () => Promise<T>, signal: AbortSignal): Promise<T> {
    signal.throwIfAborted();
    this.checkRoom();
    if (this.#runningSince !== undefined) await this.#turn(signal);
    this.#runningSince = performance.now();
    // The caller can have gone between its turn and this line.
    const result = Promise.try(() => (signal.throwIfAborted(), work())).finally(() => this.#next());
    return await unlessAborted(result, signal);
  }

  #turn(signal: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const start = () => {
        signal.removeEventListener("abort", leave);
        resolve();
      };
      const leave = () => {
        this.#waiting.splice(this.#waiting.indexOf(start), 1);
        reject(signal.reason);
      };
      signal.addEventListener("abort", leave, { once: true });
      this.#waiting.push(start);
    });
  }

  /** The turn goes from one call to the next without a gap in which a newcomer could slip in. */
  #next(): void {
    const start = this.#waiting.shift();
    if (start) start();
    else this.#runningSince = undefined;
  }
}

function unlessAborted<T>(result: Promise<T>, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const abort = () => reject(signal.reason);
    signal.addEventListener("abort", abort, { once: true });
    result.then(resolve, reject).finally(() => signal.removeEventListener("abort", abort));
  });
}
