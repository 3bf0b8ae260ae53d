import { messageOf, UserError } from "../base/errors.ts";
import { isHead } from "../base/span.ts";
import type { Stage, StageInput } from "../engine/types.ts";
import type { Admission } from "../mesh/admission.ts";
import type { Lifecycle } from "./lifecycle.ts";
import type { Queue } from "./queue.ts";

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
  readonly #stage: Stage;
  readonly #queue: Queue;
  readonly #lifecycle: Lifecycle;
  readonly #next: Admission | undefined;
  #lastWell = -Infinity;
  #probe: Promise<void> | undefined;

  constructor(parts: { stage: Stage; queue: Queue; lifecycle: Lifecycle; next: Admission | undefined }) {
    this.#stage = parts.stage;
    this.#queue = parts.queue;
    this.#lifecycle = parts.lifecycle;
    this.#next = parts.next;
  }

  /** A real call went through: as good as a probe. */
  wentWell(): void {
    this.#lastWell = performance.now();
  }

  /** Throws UserError `draining` or `not_ready`. */
  async check(): Promise<void> {
    this.#lifecycle.check();
    const problem = this.#next?.notReady;
    if (problem !== undefined) throw new UserError("not_ready", problem, "wait for the next node, or look at its log");
    if (performance.now() - this.#lastWell < KEPT_MS) return;
    // Behind a call that runs, a probe would only measure how long that call is.
    if (this.#queue.busyMs === 0) this.#probe ??= this.#run().finally(() => (this.#probe = undefined));
    if (this.#probe) await within(PATIENCE_MS, this.#probe);
    if (this.#lastWell === -Infinity) {
      const busy = this.#queue.busyMs;
      if (busy === 0) throw notReady("no token has gone through this node's layers yet");
      const problem = `the first call has been running for ${(busy / 1000).toFixed(0)} s`;
      throw new UserError("not_ready", problem, "wait for it, or send smaller calls");
    }
    if (this.#queue.busyMs > STUCK_MS) throw notReady(`one call has kept the device busy for ${STUCK_MS / 1000} s`);
  }

  async #run(): Promise<void> {
    try {
      await this.#queue.run(() => this.#stage.forward(probeOf(this.#stage), "none"), NEVER);
      this.wentWell();
    } catch (cause) {
      throw notReady(`a probe token did not go through this node's layers: ${messageOf(cause)}`, cause);
    }
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

const NEVER = new AbortController().signal;

/** One token: the first of the vocabulary, or a hidden state of zeros. */
function probeOf({ info }: Stage): StageInput {
  const rows = [{ tokens: 1, positionStart: 0 }];
  return isHead(info.span)
    ? { kind: "ids", rows, ids: new Int32Array(1) }
    : { kind: "hidden", rows, hidden: new Uint16Array(info.hiddenSize) };
}
