import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import type { CacheUse, OpenSession, Session, Stage, StageInfo, StageWork, Step, StepOutput } from "./types.ts";

/** A stage, and the device that it is on. */
export interface OpenedStage {
  readonly stage: Stage & { readonly allocatedBytes: number };
  /** Resolves with the driver's words when the device is lost. */
  readonly lost: Promise<string>;
  /** Frees the stage and closes the device. */
  close(): void;
}

export interface RecoveryOptions {
  /** Of the device, for messages. */
  readonly name: string;
  /** The same stage on the same device, opened anew. */
  readonly reopen: () => Promise<OpenedStage>;
  /** The device does not come back, or not for long: the node cannot go on. */
  readonly giveUp: (error: UserError) => void;
  readonly log: Logger;
  /** Milliseconds from anywhere, and a wait of so many. */
  readonly clock?: { readonly now: () => number; readonly sleep: (ms: number) => Promise<void> };
}

/** So many losses in such a time: something is wrong that a further try does not mend. */
const MOST_LOSSES = 5;
const LOSSES_MS = 60_000;
/** Before the first, the second, … try. A driver that resets itself is back within a second. */
const WAITS_MS = [0, 1_000, 2_000, 4_000, 8_000, 15_000];
/** A device that has not come back by then stays away: unplugged, or its driver has crashed for good. */
const PATIENCE_MS = 120_000;
/** A driver may end what runs before it says that the device is lost. */
const AFTERTHOUGHT_MS = 250;

const CLOCK = { now: () => performance.now(), sleep: (ms: number) => Bun.sleep(ms) };

/**
 * A stage that outlives its device. When the device is lost (a driver's reset, the machine's sleep), what runs ends with
 * `device_lost`, sessions are closed, and the stage is opened anew, while which it takes nothing.
 */
export class RecoveringStage implements Stage {
  readonly info: StageInfo;
  readonly #options: RecoveryOptions;
  readonly #clock: NonNullable<RecoveryOptions["clock"]>;
  #life: Life;
  #losses: number[] = [];
  #outage: UserError | undefined;
  #isDestroyed = false;

  constructor(first: OpenedStage, options: RecoveryOptions) {
    this.info = first.stage.info;
    this.#options = options;
    this.#clock = options.clock ?? CLOCK;
    this.#life = this.#begin(first);
  }

  /** Why it takes nothing now, or undefined. */
  get outage(): UserError | undefined {
    return this.#outage;
  }

  get allocatedBytes(): number {
    return this.#outage ? 0 : this.#life.stage.allocatedBytes;
  }

  get work(): StageWork | undefined {
    return this.#life.stage.work;
  }

  get cacheUse(): CacheUse {
    return this.#life.stage.cacheUse;
  }

  get waiting(): number {
    return this.#outage ? 0 : this.#life.stage.waiting;
  }

  async open(wanted: OpenSession): Promise<Session> {
    if (this.#outage) throw this.#outage;
    const life = this.#life;
    const session = await life.during(life.stage.open(wanted), wanted.signal);
    return new RecoveringSession(session, life);
  }

  longestPrefix(ids: Int32Array): { readonly tokens: number; readonly prefix?: string } {
    return this.#outage ? { tokens: 0 } : this.#life.stage.longestPrefix(ids);
  }

  destroy(): void {
    this.#isDestroyed = true;
    if (!this.#outage) this.#life.opened.close();
  }

  #begin(opened: OpenedStage): Life {
    const life = new Life(opened, (ms) => this.#clock.sleep(ms));
    void opened.lost.then((why) => this.#recover(life, why));
    return life;
  }

  async #recover(life: Life, why: string): Promise<void> {
    if (this.#isDestroyed) return;
    const { log, name } = this.#options;
    log.error("device lost", { device: name, why });
    this.#outage = deviceLost(name, why);
    life.end(this.#outage);
    life.opened.close();
    const stopped = this.#countLoss(why);
    if (stopped) return this.#options.giveUp(stopped);

    const began = this.#clock.now();
    for (let tries = this.#losses.length - 1; ; tries++) {
      await this.#clock.sleep(WAITS_MS[Math.min(tries, WAITS_MS.length - 1)]!);
      if (this.#isDestroyed) return;
      const [opened] = await Promise.allSettled([this.#options.reopen()]);
      if (opened.status === "fulfilled") {
        if (this.#isDestroyed) return opened.value.close();
        this.#life = this.#begin(opened.value);
        this.#outage = undefined;
        log.info("device is back", { device: name, seconds: ((this.#clock.now() - began) / 1000).toFixed(1) });
        return;
      }
      if (this.#isDestroyed) return;
      const end = this.#endOf(opened.reason, this.#clock.now() - began);
      if (end) return this.#options.giveUp(end);
      log.warn("device is not back yet", { device: name, problem: messageOf(opened.reason) });
    }
  }

  /** Why a further try is not worth it, or undefined. */
  #endOf(problem: unknown, triedMs: number): UserError | undefined {
    if (problem instanceof UserError && problem.code === "device_lost") return this.#countLoss(problem.message);
    // Something that another try could find otherwise: no such device, no room on it, what a driver says in its trouble.
    const mayPass = !(problem instanceof UserError) || ["no_device", "does_not_fit"].includes(problem.code);
    if (mayPass && triedMs < PATIENCE_MS) return undefined;
    if (!mayPass) return problem;
    const away = `the device ${this.#options.name} was lost and is not back after ${Math.round(triedMs / 1000)} s`;
    return new UserError("device_lost", `${away}: ${messageOf(problem)}`, HINT, { cause: problem });
  }

  #countLoss(why: string): UserError | undefined {
    const now = this.#clock.now();
    this.#losses = [...this.#losses.filter((at) => now - at < LOSSES_MS), now];
    if (this.#losses.length < MOST_LOSSES) return undefined;
    const often = `the device ${this.#options.name} was lost ${MOST_LOSSES} times within ${LOSSES_MS / 1000} s`;
    return new UserError("device_lost", `${often}, the last time: ${why}`, HINT);
  }
}

const HINT = "look at the driver's log (dmesg on Linux) for what it does not survive, then start the node again";

const deviceLost = (name: string, why: string): UserError =>
  new UserError(
    "device_lost",
    `the device ${name} is lost: ${why}`,
    "the node opens it anew by itself: try again in a moment; its sessions are gone",
  );

/** A stage from the moment when it is opened until its device is lost. */
class Life {
  readonly #sleep: (ms: number) => Promise<void>;
  readonly #running = new Set<(why: UserError) => void>();
  #end: UserError | undefined;

  constructor(
    readonly opened: OpenedStage,
    sleep: (ms: number) => Promise<void>,
  ) {
    this.#sleep = sleep;
  }

  get stage(): OpenedStage["stage"] {
    return this.opened.stage;
  }

  get isOver(): boolean {
    return this.#end !== undefined;
  }

  /** What runs ends with `why`, and so does what is asked from now on. */
  end(why: UserError): void {
    this.#end = why;
    for (const reject of this.#running) reject(why);
    this.#running.clear();
  }

  /** What `work` gives, or `device_lost` as soon as that is known. */
  async during<T>(work: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
    try {
      return await this.#unlessOver(work);
    } catch (error) {
      if (error instanceof UserError || signal?.aborted) throw error;
      await this.#unlessOver(this.#sleep(AFTERTHOUGHT_MS));
      throw error;
    }
  }

  /** Not a race with one promise that lasts as long as the device: it would keep a note of every step there ever was. */
  #unlessOver<T>(work: Promise<T>): Promise<T> {
    return new Promise((resolve, reject) => {
      if (this.#end) return reject(this.#end);
      this.#running.add(reject);
      work.then(resolve, reject).finally(() => this.#running.delete(reject));
    });
  }
}

class RecoveringSession implements Session {
  constructor(
    private readonly session: Session,
    private readonly life: Life,
  ) {}

  get length(): number {
    return this.isClosed ? 0 : this.session.length;
  }

  get maxLength(): number {
    return this.session.maxLength;
  }

  get isClosed(): boolean {
    return this.life.isOver || this.session.isClosed;
  }

  async run(step: Step): Promise<StepOutput> {
    if (this.life.isOver) this.session.close(); // it says itself that nothing is held
    return this.life.isOver ? this.session.run(step) : this.life.during(this.session.run(step), step.signal);
  }

  cut(length: number): void {
    if (!this.isClosed) this.session.cut(length);
  }

  close(): void {
    this.session.close();
  }
}
