import { UserError } from "../base/errors.ts";

/** What runs here now, so that a node that is told to stop can finish it and take nothing new. */
export class Lifecycle {
  #running = 0;
  #idle: (() => void) | undefined;
  #draining: Promise<void> | undefined;

  get isDraining(): boolean {
    return this.#draining !== undefined;
  }

  /** Throws UserError `draining`. */
  async run<T>(work: () => Promise<T>): Promise<T> {
    this.check();
    this.#running++;
    try {
      return await work();
    } finally {
      if (--this.#running === 0) this.#idle?.();
    }
  }

  check(): void {
    if (!this.isDraining) return;
    throw new UserError("draining", "this node is stopping and takes no new calls", "send the call to another node");
  }

  /** Takes nothing new from now on; resolves when all that runs has ended. */
  drain(): Promise<void> {
    this.#draining ??= new Promise((resolve) => {
      this.#idle = resolve;
      if (this.#running === 0) resolve();
    });
    return this.#draining;
  }
}
