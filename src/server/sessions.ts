import { UserError } from "../base/errors.ts";
import type { OpenSession, Session } from "../engine/types.ts";
import { unlessAborted } from "./abort.ts";

/** One step of a session: `local` runs here, `rest` in the nodes that follow; together they make the reply. */
export interface SessionCall<Local, Reply> {
  readonly id: string;
  /** Grows within a session. The same step again gets the same reply. */
  readonly step: number;
  /** Tokens that the session is to hold before this step. */
  readonly positionStart: number;
  /** Of all that the step is asked to do: what makes the same step the same call. */
  readonly digest: string;
  /** At opening: tokens to reserve room for. */
  readonly maxLength: number;
  /** At opening: the `positionStart` tokens that an earlier session may have left here. */
  readonly prefix?: string;
  /** The node that the step is from, where it is from one. */
  readonly caller?: string;
  /** Of this caller. The step ends early when all that wait for it are gone. */
  readonly signal: AbortSignal;
  /** After an error the session is as it was, or closed: `Session.run` keeps that. */
  local(session: Session, signal: AbortSignal): Promise<Local>;
  rest(output: Local, signal: AbortSignal): Promise<Reply>;
  /** The step failed and the session could not stay: it is gone here, and no other session of its name has begun. */
  gone?(): void;
}

export interface SessionTableOptions<Reply> {
  readonly open: (id: string, session: OpenSession) => Promise<Session>;
  readonly maxSessions: number;
  /** Milliseconds after its last step at which a session is forgotten. */
  readonly idleMs: number;
  /** Milliseconds from anywhere. */
  readonly clock: () => number;
  /** What a kept reply holds of this machine's memory. */
  readonly bytesOf: (reply: Reply) => number;
  /** For all kept replies together. One that has no room is not kept, and made again when its step is. */
  readonly keptBytes: number;
}

type Opening = Pick<SessionCall<unknown, unknown>, "id" | "positionStart" | "maxLength" | "prefix">;

/** What makes two calls of a session the same. */
interface StepKey {
  readonly step: number;
  readonly positionStart: number;
  readonly digest: string;
}

interface RunningStep<Reply> extends StepKey {
  readonly reply: Promise<Reply>;
  readonly control: AbortController;
  waiters: number;
}

interface Entry<Reply> {
  readonly id: string;
  /** Undefined while it opens. */
  session?: Session;
  running?: RunningStep<Reply>;
  last?: StepKey & { readonly kept?: { readonly reply: Reply; readonly bytes: number } };
  lastUsed: number;
  /** The node that the last step was from. */
  caller?: string;
}

/**
 * The sessions of a node by their ids, with the rules of the contract: where a step may begin, what a retry gets, what an
 * error leaves behind. After any error a session is as it was before the call, or gone.
 */
export class SessionTable<Reply> {
  readonly #options: SessionTableOptions<Reply>;
  readonly #entries = new Map<string, Entry<Reply>>();
  #keptBytes = 0;

  constructor(options: SessionTableOptions<Reply>) {
    this.#options = options;
  }

  get size(): number {
    return this.#entries.size;
  }

  /** Tokens that the session holds; undefined where there is none. */
  lengthOf(id: string): number | undefined {
    return this.#live(id)?.session?.length;
  }

  has(id: string): boolean {
    return this.#live(id) !== undefined;
  }

  /**
   * Runs a step, waits for the same one that runs already, or gives the reply that it had.
   *
   * Throws UserError `session_lost` with `cache_len` (tokens to replay from), `step_conflict`, `no_room`; what `open`,
   * `local` and `rest` throw; the signal's reason as soon as that is aborted.
   */
  async run<Local>(call: SessionCall<Local, Reply>): Promise<Reply> {
    for (;;) {
      call.signal.throwIfAborted();
      const entry = this.#live(call.id);
      const running = entry?.running;
      if (running) {
        if (call.step < running.step) throw conflict(call, running, "runs already");
        const isEnding = running.control.signal.aborted;
        if (call.step === running.step && !isEnding) {
          if (!isSame(call, running))
            throw conflict(call, running, "runs with other tokens, another start, want or sampling");
          return await this.#wait(running, call.signal);
        }
        await unlessAborted(settled(running.reply), call.signal); // a later step looks again when this one is over
        continue;
      }
      const last = entry?.last;
      if (last && call.step < last.step) throw conflict(call, last, "was the last one");
      if (last && call.step === last.step) {
        if (!isSame(call, last)) throw conflict(call, last, "had other tokens, another start, want or sampling");
        entry.lastUsed = this.#options.clock();
        if (last.kept) return last.kept.reply;
      }
      return await this.#wait(this.#start(entry, call), call.signal);
    }
  }

  /** Frees the session `id`, and `id.0`, `id.1`, … of a batch. What runs is ended. Returns how many there were. */
  delete(id: string): number {
    this.expire(); // what has is not known any more
    const meant = [...this.#entries.values()].filter((entry) => isOfSession(entry.id, id));
    for (const entry of meant) this.#end(entry, deleted(entry.id));
    return meant.length;
  }

  /** Frees sessions that have been idle for too long. */
  expire(): void {
    for (const entry of this.#entries.values()) if (this.#isIdle(entry)) this.#forget(entry);
  }

  /** The sessions that wait for the next step of a node for which `isGone` holds. */
  forsaken(isGone: (node: string) => boolean): string[] {
    const waiting = [...this.#entries.values()].filter(({ running }) => running === undefined);
    return waiting.flatMap(({ id, caller }) => (caller !== undefined && isGone(caller) ? [id] : []));
  }

  /** Frees all sessions. */
  close(): void {
    for (const entry of this.#entries.values()) this.#end(entry, deleted(entry.id));
  }

  #live(id: string): Entry<Reply> | undefined {
    const entry = this.#entries.get(id);
    if (entry === undefined) return undefined;
    if (!this.#isIdle(entry) && !entry.session?.isClosed) return entry;
    if (entry.running) return entry; // closed under a step, which is about to say so
    this.#forget(entry);
    return undefined;
  }

  #isIdle({ running, lastUsed }: Entry<Reply>): boolean {
    return running === undefined && this.#options.clock() - lastUsed >= this.#options.idleMs;
  }

  #start<Local>(known: Entry<Reply> | undefined, call: SessionCall<Local, Reply>): RunningStep<Reply> {
    const { id, step, positionStart, digest, prefix } = call;
    const length = known?.session?.length ?? 0;
    const begins = known === undefined && prefix !== undefined;
    if (positionStart > length && !begins) throw lost(call, length);
    const entry = known ?? this.#add(id);
    const control = new AbortController();
    const reply = this.#run(entry, call, control.signal);
    reply.catch(() => {}); // it is told to those that wait
    const running: RunningStep<Reply> = { step, positionStart, digest, reply, control, waiters: 0 };
    entry.running = running;
    entry.caller = call.caller;
    return running;
  }

  #add(id: string): Entry<Reply> {
    const { maxSessions, clock } = this.#options;
    if (this.#entries.size >= maxSessions) this.expire();
    if (this.#entries.size >= maxSessions) {
      throw new UserError(
        "no_room",
        `${this.#entries.size} sessions are open on this node, and it keeps ${maxSessions}`,
        "try again in a moment, or end a session (DELETE /sessions/{id})",
      );
    }
    const entry = { id, lastUsed: clock() };
    this.#entries.set(id, entry);
    return entry;
  }

  async #run<Local>(entry: Entry<Reply>, call: SessionCall<Local, Reply>, signal: AbortSignal): Promise<Reply> {
    const isNew = entry.session === undefined;
    const { step, positionStart, digest } = call;
    try {
      await undefined; // `running` is in its place from here on
      const session = (entry.session ??= await this.#open(call, signal));
      if (signal.aborted) throw signal.reason;
      const before = session.length;
      const output = await call.local(session, signal);
      try {
        const reply = await call.rest(output, signal);
        this.#keep(entry, { step, positionStart, digest }, reply);
        return reply;
      } catch (error) {
        // What the cut tokens were is known to nobody: such a session cannot be what it was.
        if (before > positionStart) session.close();
        else if (!session.isClosed) session.cut(before);
        throw error;
      }
    } catch (error) {
      const stays = !isNew && !entry.session!.isClosed;
      if (!stays && this.#forget(entry)) call.gone?.();
      throw error;
    } finally {
      entry.running = undefined;
      entry.lastUsed = this.#options.clock();
    }
  }

  async #open({ id, positionStart, maxLength, prefix }: Opening, signal: AbortSignal) {
    const session = await this.#options.open(id, { maxLength, prefix, stay: "lasting", signal });
    if (session.length === positionStart) return session;
    session.close();
    throw lost({ id, positionStart }, 0);
  }

  #keep(entry: Entry<Reply>, key: StepKey, reply: Reply): void {
    this.#dropReply(entry);
    const bytes = this.#options.bytesOf(reply);
    const isLive = this.#entries.get(entry.id) === entry;
    const hasRoom = isLive && this.#keptBytes + bytes <= this.#options.keptBytes;
    if (hasRoom) this.#keptBytes += bytes;
    entry.last = { ...key, ...(hasRoom && { kept: { reply, bytes } }) };
  }

  #dropReply(entry: Entry<Reply>): void {
    this.#keptBytes -= entry.last?.kept?.bytes ?? 0;
    entry.last = undefined;
  }

  #wait(running: RunningStep<Reply>, signal: AbortSignal): Promise<Reply> {
    running.waiters++;
    return new Promise((resolve, reject) => {
      const leave = () => {
        reject(signal.reason);
        if (--running.waiters === 0) running.control.abort(signal.reason);
      };
      const ended = () => reject(running.control.signal.reason);
      signal.addEventListener("abort", leave, { once: true });
      running.control.signal.addEventListener("abort", ended, { once: true });
      running.reply.then(resolve, reject).finally(() => {
        signal.removeEventListener("abort", leave);
        running.control.signal.removeEventListener("abort", ended);
      });
    });
  }

  #end(entry: Entry<Reply>, why: UserError): void {
    this.#forget(entry);
    entry.running?.control.abort(why);
  }

  /** False where it was gone before. */
  #forget(entry: Entry<Reply>): boolean {
    entry.session?.close();
    this.#dropReply(entry);
    return this.#entries.get(entry.id) === entry && this.#entries.delete(entry.id);
  }
}

/** Whether a session is the one that is called `id`, or one of the rows of a batch of that name. */
export const isOfSession = (session: string, id: string): boolean =>
  session === id || (session.startsWith(`${id}.`) && /^\d+$/.test(session.slice(id.length + 1)));

const isSame = (a: StepKey, b: StepKey): boolean => a.positionStart === b.positionStart && a.digest === b.digest;

const settled = (work: Promise<unknown>): Promise<void> => work.then(ignore, ignore);
const ignore = () => {};

function lost({ id, positionStart }: { id: string; positionStart: number }, length: number): UserError {
  return new UserError(
    "session_lost",
    `the call begins at position ${positionStart} of the session ${id}, of which this node holds ${length} tokens`,
    length > 0 ? `send the tokens from position ${length} on again` : "send the whole sequence again, from position 0",
    { details: { cache_len: length } },
  );
}

function conflict(call: StepKey & { id: string }, other: StepKey, what: string): UserError {
  return new UserError(
    "step_conflict",
    `step ${call.step} of the session ${call.id} came, and step ${other.step} ${what}`,
    "number the calls of a session upwards, and repeat a step only as it was",
  );
}

const deleted = (id: string): UserError =>
  new UserError("session_lost", `the session ${id} was deleted while a step of it ran`, "open a new session", {
    details: { cache_len: 0 },
  });
