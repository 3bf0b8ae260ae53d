import { createHash } from "node:crypto";
import { bytesOf } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { cut } from "../base/quote.ts";
import { isHead } from "../base/span.ts";
import type { OpenSession, Session, Stage, Step, StepOutput } from "../engine/types.ts";
import type { Admission } from "../mesh/admission.ts";
import { FrameBatcher } from "../mesh/frame-batcher.ts";
import type { RowResult } from "../protocol/reply.ts";
import type { Sampling, Want } from "../protocol/rows.ts";
import { unlessAborted } from "./abort.ts";
import { isOfSession, SessionTable } from "./sessions.ts";
import { TokenMeter } from "./token-meter.ts";

/** One row to run through this node and those after it. */
export interface RowCall {
  /** Absent: nothing is kept of the row. */
  readonly session?: string;
  /** Always there with a session. */
  readonly step?: number;
  readonly positionStart: number;
  /** At opening: tokens to reserve room for. Default: the node's longest context. */
  readonly maxLen?: number;
  /** At opening: begin with `positionStart` tokens that an earlier session may have left, named by their digest. */
  readonly prefix?: string;
  readonly input: Step["input"];
  /** [n] The ids of tokens that come as hidden states, where they are known. */
  readonly tokenIds?: Int32Array;
  readonly want: Want;
  readonly sampling?: Sampling;
  readonly signal: AbortSignal;
  readonly requestId: string;
  /** When the caller's patience is at its end, in `performance.now()`: nodes further on are told. The signal says so too. */
  readonly deadline?: number;
  /** `local`: not passed on. A list: the remaining hops. Absent: passed on where there is a next node. */
  readonly route?: "local" | readonly string[];
  /** The same for all rows of one call. */
  readonly call?: unknown;
  /** The id of the node that passed it on, where one did. */
  readonly caller?: string;
}

export interface RowReply {
  readonly result: RowResult;
  /** The layer after the last one that the row went through. */
  readonly end: number;
  /** Tokens that the session holds now; 0 without one. */
  readonly cacheLen: number;
  /** Milliseconds: waiting for room, in this node's layers (waiting for a pass included), in the nodes after it. */
  readonly timing: { readonly queue: number; readonly stage: number; readonly next?: number };
}

export interface RowRunnerOptions {
  readonly stage: Stage;
  readonly next: Admission | undefined;
  /** Rows without an open session that may run or wait here beside the one that runs. */
  readonly maxWaiting: number;
  readonly maxSessions: number;
  readonly idleMs: number;
  readonly log: Logger;
  /** Whether a node that passed rows on is not heard of any more. */
  readonly isGone?: (node: string) => boolean;
  /** Milliseconds from anywhere; default `performance.now`. */
  readonly clock?: () => number;
}

/** For the last replies of all sessions. Tokens are small; states and logits may find no room, and are made again. */
const KEPT_BYTES = 64 << 20;
/** A reply without values: a token and its logprobs. */
const SMALL_REPLY_BYTES = 1024;

/**
 * Runs rows: each through this node's layers, then, where there is a next node, through those of the chain. What waits
 * together runs together, here and further on. Sessions are opened, kept and ended here.
 */
export class RowRunner {
  readonly stage: Stage;
  readonly #options: RowRunnerOptions;
  readonly #sessions: SessionTable<RowReply>;
  readonly #frames: FrameBatcher | undefined;
  readonly #meter = new TokenMeter();
  /** Sessions whose end is on its way along the chain: one of the same name begins after that. */
  readonly #leaving = new Map<string, Promise<unknown>>();
  #inStage = 0;
  #progressAt = 0;
  #lastWellAt = -Infinity;

  constructor(options: RowRunnerOptions) {
    const { stage, next, maxSessions, idleMs, clock = () => performance.now() } = options;
    this.stage = stage;
    this.#options = options;
    this.#frames = next && new FrameBatcher(next);
    this.#sessions = new SessionTable({
      open: (id, session) => this.#open(id, session),
      maxSessions,
      idleMs,
      clock,
      bytesOf: ({ result }) => ("values" in result ? result.values.buffer.byteLength : SMALL_REPLY_BYTES),
      keptBytes: KEPT_BYTES,
    });
  }

  /** Tokens of the longest sequence that this node and those after it take, as far as is known. */
  get maxContext(): number {
    return Math.min(this.stage.info.maxContext, this.#options.next?.maxContext ?? Infinity);
  }

  /** Sessions that are open on this node. */
  get sessions(): number {
    return this.#sessions.size;
  }

  /** Tokens of rows that went through this node's layers, over the last few seconds. */
  get tokensPerSecond(): number {
    return this.#meter.perSecond;
  }

  /** For how long rows have been in the stage without one that came out; 0 where none is. */
  get busyMs(): number {
    return this.#inStage === 0 ? 0 : Math.max(performance.now() - this.#progressAt, Number.MIN_VALUE);
  }

  /** When a row last came out of the stage, in `performance.now()`. */
  get lastWellAt(): number {
    return this.#lastWellAt;
  }

  /** Tokens that a session holds here; 0 where there is none. */
  lengthOf(session: string | undefined): number {
    return session === undefined ? 0 : (this.#sessions.lengthOf(session) ?? 0);
  }

  /** Whether a row would bring the node new work, rather than go on with what it has promised room for. */
  isNew({ session }: { readonly session?: string }): boolean {
    return session === undefined || !this.#sessions.has(session);
  }

  /** Throws `noRoom`. */
  checkRoom(): void {
    const { noRoom } = this;
    if (noRoom) throw noRoom;
  }

  /** UserError `no_room` where further new work would be one too many. */
  get noRoom(): UserError | undefined {
    const { maxWaiting } = this.#options;
    if (this.#inStage <= maxWaiting) return undefined;
    return new UserError(
      "no_room",
      `${this.#inStage} rows run or wait on this node, and it lets ${maxWaiting} wait`,
      "try again in a moment",
    );
  }

  /** The longest beginning of `ids` that a session can start with here: its tokens and its digest. */
  longestPrefix(ids: Int32Array): { readonly tokens: number; readonly prefix?: string } {
    return this.stage.longestPrefix(ids);
  }

  /** The next node where rows with this route are passed on to it. Throws UserError where that cannot be. */
  nextOf(route: RowCall["route"]): Admission | undefined {
    const { next } = this.#options;
    if (route === "local" || route?.length === 0) return undefined;
    const hop = route?.[0];
    if (hop !== undefined && (next === undefined || URL.parse(hop)?.href.replace(/\/*$/, "/") !== next.next.url)) {
      throw new UserError(
        "not_supported",
        `the route goes on to ${cut(hop)}, and this node passes on to ${next?.next.url ?? "no other node"}`,
        "a node calls only the node it was started with (--next)",
      );
    }
    if (next?.refusal) throw next.refusal;
    return next;
  }

  /**
   * Throws UserError (`session_lost`, `step_conflict`, `no_room`, `context_exceeded`, …), the RemoteError of a later node, or
   * the signal's reason. A session is then as it was, or gone.
   */
  async run(row: RowCall): Promise<RowReply> {
    const passesOn = this.nextOf(row.route) !== undefined;
    const { session } = row;
    return session === undefined ? this.#runAlone(row, passesOn) : this.#runStep({ ...row, session }, passesOn);
  }

  /** One token through this node's layers, to see whether they work. */
  async probe(): Promise<void> {
    const { info } = this.stage;
    const input = isHead(info.span)
      ? ({ kind: "ids", ids: new Int32Array(1) } as const)
      : ({ kind: "hidden", hidden: new Uint16Array(info.hiddenSize) } as const);
    const signal = new AbortController().signal;
    await this.#passing({ positionStart: 0, input, want: "none", signal, requestId: "probe" });
  }

  /**
   * Frees a session (and the rows of a batch of its name) here at once, and along the chain. False where no node knows
   * it. Throws what the next node's failure is; it is free here then.
   */
  async deleteSession(id: string, route?: RowCall["route"]): Promise<boolean> {
    const known = this.#sessions.delete(id) > 0;
    const isLast = this.#options.next === undefined || route === "local" || route?.length === 0;
    const beyond = isLast ? false : await this.#deleteBeyond(id);
    return known || beyond;
  }

  /** As `deleteSession`, for those that do not wait for it. */
  forgetSession(id: string): void {
    this.deleteSession(id).catch((error: unknown) => {
      this.#options.log.debug("a session could not be ended along the chain: it will expire", { why: String(error) });
    });
  }

  /**
   * Frees sessions that have been idle for too long: nodes further on have waited as long. And, along the chain, those of nodes
   * that are gone: nobody could go on with them.
   */
  expire(): void {
    const { isGone = () => false, log } = this.#options;
    this.#sessions.expire();
    const forsaken = this.#sessions.forsaken(isGone);
    if (forsaken.length > 0) log.info("sessions of a node that is gone are ended", { sessions: forsaken.length });
    for (const id of forsaken) this.forgetSession(id);
  }

  /** Frees all sessions. */
  close(): void {
    this.#sessions.close();
  }

  async #open(id: string, session: OpenSession): Promise<Session> {
    const leaving = this.#leaving.get(batchOf(id));
    if (leaving) await (session.signal ? unlessAborted(leaving, session.signal) : leaving);
    return this.stage.open(session);
  }

  async #runAlone(row: RowCall, passesOn: boolean): Promise<RowReply> {
    // Work that is on the device ends by itself; its caller does not wait for that.
    const { output, timing } = await unlessAborted(this.#passing(row), row.signal);
    this.#meter.count(tokensOf(row, this.stage));
    return this.#rest(row, output, timing, passesOn, row.signal);
  }

  async #passing(row: RowCall): Promise<{ output: StepOutput; timing: { queue: number; stage: number } }> {
    return this.#inside(async () => {
      const { signal, positionStart } = row;
      const opened = performance.now();
      const session = await this.stage.open({
        maxLength: positionStart + tokensOf(row, this.stage),
        stay: "passing",
        signal,
      });
      const began = performance.now();
      try {
        const output = await session.run(stepOf(row, signal));
        return { output, timing: { queue: began - opened, stage: performance.now() - began } };
      } finally {
        session.close();
      }
    });
  }

  async #runStep(row: RowCall & { session: string }, passesOn: boolean): Promise<RowReply> {
    const { session: id, step, positionStart, maxLen, prefix, caller, signal } = row;
    const asked = performance.now();
    let wasSent = false;
    return this.#sessions.run({
      id,
      step: step!,
      positionStart,
      digest: digestOf(row),
      maxLength: maxLen ?? (passesOn ? this.maxContext : this.stage.info.maxContext),
      prefix,
      caller,
      signal,
      local: async (session: Session, signal) => {
        const began = performance.now();
        const output = await this.#inside(() => session.run(stepOf(row, signal)));
        this.#meter.count(tokensOf(row, this.stage));
        return { output, timing: { queue: began - asked, stage: performance.now() - began } };
      },
      rest: ({ output, timing }, signal) => {
        wasSent = passesOn;
        return this.#rest(row, output, timing, passesOn, signal);
      },
      gone: () => {
        if (wasSent) this.forgetSession(id);
      },
    });
  }

  async #rest(
    row: RowCall,
    output: StepOutput,
    timing: RowReply["timing"],
    passesOn: boolean,
    signal: AbortSignal,
  ): Promise<RowReply> {
    const { session, positionStart, input, route, requestId, deadline } = row;
    const tokens = tokensOf(row, this.stage);
    const cacheLen = session === undefined ? 0 : positionStart + tokens;
    if (!passesOn || output.kind !== "hidden") {
      return { result: this.#result(row, output), end: this.stage.info.span.end, cacheLen, timing };
    }
    const { step, maxLen, prefix, want, sampling } = row;
    const sentAt = performance.now();
    const { result, end } = await this.#frames!.send({
      row: { session, step, positionStart, maxLen, prefix, tokens, want, sampling },
      values: output.values,
      tokenIds: input.kind === "ids" ? input.ids : row.tokenIds,
      requestId,
      route: Array.isArray(route) ? route.slice(1) : undefined,
      deadline,
      signal,
    });
    return { result, end, cacheLen, timing: { ...timing, next: performance.now() - sentAt } };
  }

  #result({ sampling }: RowCall, output: StepOutput): RowResult {
    if (output.kind !== "token") return output;
    const isLast = this.stage.info.eosTokenIds.includes(output.id) || sampling?.stop_token_ids?.includes(output.id);
    return { ...output, finish: isLast ? "stop" : null };
  }

  /** Counts what is in the stage, and notes when something comes out of it. */
  async #inside<T>(work: () => Promise<T>): Promise<T> {
    if (this.#inStage++ === 0) this.#progressAt = performance.now();
    try {
      const result = await work();
      this.#lastWellAt = performance.now();
      return result;
    } finally {
      this.#inStage--;
      this.#progressAt = performance.now();
    }
  }

  /**
   * Frees a session on the nodes after this one. A frame that is on its way may open it there after it was ended, so it
   * is ended once more behind such a frame.
   */
  #deleteBeyond(id: string): Promise<boolean> {
    const { next } = this.#options.next!;
    const first = next.deleteSession(id);
    const onItsWay = this.#frames!.settled((session) => isOfSession(session, id));
    const all = Promise.allSettled([first, onItsWay?.then(() => next.deleteSession(id))]);
    const batch = batchOf(id);
    this.#leaving.set(batch, all);
    void all.then(() => {
      if (this.#leaving.get(batch) === all) this.#leaving.delete(batch);
    });
    return first;
  }
}

/** `chat` of `chat.3`. */
const batchOf = (session: string): string => session.replace(/\.\d+$/, "");

const tokensOf = ({ input }: RowCall, { info }: Stage): number =>
  input.kind === "ids" ? input.ids.length : input.hidden.length / info.hiddenSize;

function stepOf(row: RowCall, signal: AbortSignal): Step {
  const { input, positionStart, want, sampling, tokenIds, call = row } = row;
  return { input, positionStart, want, sampling, tokenIds, call, signal };
}

/** Of all that decides what a step gives. */
function digestOf({ input, tokenIds, want, sampling }: RowCall): string {
  const hash = createHash("sha256").update(JSON.stringify([want, sampling, tokenIds !== undefined]));
  hash.update(bytesOf(input.kind === "ids" ? input.ids : input.hidden));
  if (tokenIds) hash.update(bytesOf(tokenIds));
  return hash.digest("hex");
}
