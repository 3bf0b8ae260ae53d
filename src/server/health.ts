import { messageOf, UserError } from "../base/errors.ts";
import type { Admission } from "../mesh/admission.ts";
import type { Lifecycle } from "./lifecycle.ts";
import type { RowRunner } from "./rows.ts";

/** A probe, or a call, that went well this lately speaks for now. */
const KEPT_MS = 3_000;
/** So long a question waits for a probe; a slow device that was well before stays so meanwhile. */
const PATIENCE_MS = 500;
/** Nothing takes this long on a device that works: a hop does not wait longer for an answer. */
const STUCK_MS = 600_000;

/**
 * Whether this node can take calls: it is not stopping, a token went through its layers lately, and the rest of the
 * chain is ready, as admission last saw it. No question runs down the chain.
 */
export class Readiness {
  readonly #runner: RowRunner;
  readonly #lifecycle: Lifecycle;
  readonly #next: Admission | undefined;
  #lastProbed = -Infinity;
  #probe: Promise<void> | undefined;

  constructor(parts: { runner: RowRunner; lifecycle: Lifecycle; next: Admission | undefined }) {
    this.#runner = parts.runner;
    this.#lifecycle = parts.lifecycle;
    this.#next = parts.next;
  }

  /** A real call that went through is as good as a probe. */
  get #lastWell(): number {
    return Math.max(this.#lastProbed, this.#runner.lastWellAt);
  }

  /** Throws UserError `draining`, `device_lost` or `not_ready`. */
  async check(): Promise<void> {
    this.#lifecycle.check();
    const { outage } = this.#runner.stage;
    if (outage) throw outage;
    const problem = this.#next?.notReady;
    if (problem !== undefined) throw new UserError("not_ready", problem, "wait for the next node, or look at its log");
    if (performance.now() - this.#lastWell < KEPT_MS) return;
    // Behind a call that runs, a probe would only measure how long that call is.
    if (this.#runner.busyMs === 0) this.#probe ??= this.#run().finally(() => (this.#probe = undefined));
    if (this.#probe) await within(PATIENCE_MS, this.#probe);
    if (this.#lastWell === -Infinity) {
      const busy = this.#runner.busyMs;
      if (busy === 0) throw notReady("no token has gone through this node's layers yet");
      const problem = `the first call has been running for ${(busy / 1000).toFixed(0)} s`;
      throw new UserError("not_ready", problem, "wait for it, or send smaller calls");
    }
    if (this.#runner.busyMs > STUCK_MS) throw notReady(`one call has kept the device busy for ${STUCK_MS / 1000} s`);
  }

  async #run(): Promise<void> {
    try {
      await this.#runner.probe();
    } catch (cause) {
      const isFull = cause instanceof UserError && cause.code === "no_room";
      // Sessions have taken all the room, so a token did go through; and they may go on.
      if (!isFull) throw notReady(`a probe token did not go through this node's layers: ${messageOf(cause)}`, cause);
    }
    this.#lastProbed = performance.now();
  }
}

const notReady = (problem: string, cause?: unknown): UserError =>
  new UserError("not_ready", problem, "wait a moment; if it stays so, look at the node's log and restart it", {
    cause,
  });

/** Waits for `work`, but not for long. Its failure is this one's, while it is waited for. */
function within(ms: number, work: Promise<void>): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    work.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}
