import { createHash } from "node:crypto";
import { UserError } from "../../src/base/errors.ts";
import { isTail } from "../../src/base/span.ts";
import type { CacheUse, OpenSession, Session, Stage, Step, StepOutput } from "../../src/engine/types.ts";
import { isDrawn } from "../../src/protocol/sampling.ts";

/**
 * A model of 4 layers whose numbers a test can follow, in whole numbers that bfloat16 holds exactly. A hidden state is
 * [token id, position, layers so far, what attention saw]. Each layer adds its number, and the sum of the ids up to the
 * token, so a row that saw another row's token or a padded slot shows it. The tail's token is the sum of all four, and of
 * the seed where one is drawn.
 */
export const LAYERS = 4;
export const HIDDEN = 4;
export const VOCAB = 256;
export const CONTEXT = 40;
export const PAGE_TOKENS = 4;

export interface TinyStageOptions {
  readonly start: number;
  readonly end: number;
  readonly eosTokenIds?: readonly number[];
  /** The tail's token, whatever went in. */
  readonly token?: number;
  /** Awaited by each pass before it runs. */
  readonly gate?: () => Promise<void> | void;
  /** Asked for each step of a pass; what it throws is that step's error. */
  readonly refuse?: (step: Step) => void;
  readonly maxContext?: number;
  /** Room for tokens, in pages of 4. */
  readonly pages?: number;
}

interface Job {
  readonly session: TinySession;
  readonly step: Step;
  readonly resolve: (output: StepOutput) => void;
  readonly reject: (error: unknown) => void;
}

interface Waiter {
  readonly pages: number;
  readonly admit: () => void;
  readonly refuse: () => void;
}

/** A stage with sessions, room, passes and prefixes as the real one has them, and no device. */
export class TinyStage implements Stage {
  readonly info;
  /** Passes. */
  calls = 0;
  /** Steps that went through one. */
  steps = 0;
  /** The most steps of one pass. */
  widest = 0;
  prefixHits = 0;
  prefixTokens = 0;
  readonly options: TinyStageOptions;
  readonly #pages: number;
  readonly #open = new Set<TinySession>();
  readonly #waiters: Waiter[] = [];
  readonly #prefixes = new Map<string, readonly number[]>();
  #jobs: Job[] = [];
  #isRunning = false;

  constructor(options: TinyStageOptions) {
    this.options = options;
    this.#pages = options.pages ?? 400;
    const span = { start: options.start, end: options.end, total: LAYERS };
    const { eosTokenIds = [], maxContext = CONTEXT } = options;
    this.info = { span, hiddenSize: HIDDEN, vocabSize: VOCAB, maxContext, eosTokenIds };
  }

  get cacheUse(): CacheUse {
    return {
      pageTokens: PAGE_TOKENS,
      pages: this.#pages,
      reservedPages: this.#reserved(),
      sessions: this.#open.size,
      prefixHits: this.prefixHits,
      prefixTokens: this.prefixTokens,
    };
  }

  get waiting(): number {
    return this.#jobs.length;
  }

  async open({ maxLength, prefix, stay, signal }: OpenSession): Promise<Session> {
    signal?.throwIfAborted();
    if (maxLength > this.info.maxContext) throw new UserError("context_exceeded", "too long", "be shorter");
    const pages = Math.ceil(maxLength / PAGE_TOKENS);
    const hasRoom = () => this.#reserved() + pages <= this.#pages;
    const beginning = prefix === undefined ? [] : this.#prefixes.get(prefix);
    if (beginning === undefined) {
      throw new UserError("session_lost", "the prefix is not here", "send it", { details: { cache_len: 0 } });
    }
    if (stay === "lasting" ? !hasRoom() : this.#waiters.length > 0 || !hasRoom()) {
      if (stay === "lasting") throw noRoom();
      await this.#turn(pages, signal);
    }
    if (prefix !== undefined) {
      this.prefixHits++;
      this.prefixTokens += beginning.length;
    }
    const session = new TinySession(this, { maxLength, pages, stay }, beginning);
    this.#open.add(session);
    this.#refuseHopeless();
    return session;
  }

  longestPrefix(ids: Int32Array): { tokens: number; prefix?: string } {
    for (let tokens = ids.length - (ids.length % PAGE_TOKENS); tokens > 0; tokens -= PAGE_TOKENS) {
      const prefix = digestOf([...ids.subarray(0, tokens)]);
      if (this.#prefixes.has(prefix)) return { tokens, prefix };
    }
    return { tokens: 0 };
  }

  /** As a node does whose cache was needed for something else. */
  forgetPrefixes(): void {
    this.#prefixes.clear();
  }

  destroy(): void {}

  run(session: TinySession, step: Step): Promise<StepOutput> {
    return new Promise((resolve, reject) => {
      const { signal } = step;
      if (signal?.aborted) return reject(signal.reason);
      const leave = () => {
        if (!this.#jobs.includes(job)) return; // in a pass: it ends with that
        this.#jobs = this.#jobs.filter((other) => other !== job);
        reject(signal!.reason);
      };
      signal?.addEventListener("abort", leave, { once: true });
      const job: Job = { session, step, resolve, reject };
      this.#jobs.push(job);
      void this.#passes();
    });
  }

  /** The pages that have become full since `from`. */
  remember(ids: readonly number[], from: number): void {
    for (let tokens = from - (from % PAGE_TOKENS) + PAGE_TOKENS; tokens <= ids.length; tokens += PAGE_TOKENS) {
      const beginning = ids.slice(0, tokens);
      this.#prefixes.set(digestOf(beginning), beginning);
    }
  }

  closed(session: TinySession): void {
    this.#open.delete(session);
    while (this.#waiters[0] && this.#reserved() + this.#waiters[0].pages <= this.#pages) this.#waiters.shift()!.admit();
  }

  give(step: Step, states: number[]): StepOutput {
    if (!isTail(this.info.span)) return { kind: "hidden", values: toBits(states) };
    const { sampling } = step;
    const tokens = states.length / HIDDEN;
    const drawn = sampling && isDrawn(sampling) ? (sampling.seed ?? 0) : 0;
    const tokenAt = (index: number) =>
      this.options.token ??
      (states.slice(index * HIDDEN, (index + 1) * HIDDEN).reduce((a, b) => a + b) + drawn) % VOCAB;
    const logits = (index: number) => Array.from({ length: VOCAB }, (_, id) => (id === tokenAt(index) ? 1 : 0));
    switch (step.want) {
      case "token": {
        const id = tokenAt(tokens - 1);
        const top = Array.from({ length: sampling?.logprobs ?? 0 }, (_, i) => ({ id: (id + i) % VOCAB, logprob: -i }));
        return { kind: "token", id, ...(sampling?.logprobs && { logprobs: { logprob: -0.5, top } }) };
      }
      case "logits":
        return { kind: "logits", values: toBits(logits(tokens - 1)) };
      case "all_logits":
        return { kind: "all_logits", values: toBits(states.flatMap((_, i) => (i < tokens ? logits(i) : []))) };
      case "hidden":
        return { kind: "hidden", values: toBits(states) };
      case "none":
        return { kind: "none" };
    }
  }

  async #passes(): Promise<void> {
    if (this.#isRunning) return;
    this.#isRunning = true;
    await new Promise((resolve) => setImmediate(resolve));
    while (this.#jobs.length > 0) {
      const pass = this.#jobs;
      this.#jobs = [];
      this.calls++;
      this.steps += pass.length;
      this.widest = Math.max(this.widest, pass.length);
      const begun = pass.filter(({ session, step, reject }) => {
        const problem = session.begin(step);
        if (problem) reject(problem);
        return !problem;
      });
      try {
        await this.options.gate?.();
        for (const job of begun) this.#finish(job);
      } catch (error) {
        for (const { reject } of begun) reject(error);
      }
    }
    this.#isRunning = false;
  }

  #finish({ session, step, resolve, reject }: Job): void {
    try {
      step.signal?.throwIfAborted();
      this.options.refuse?.(step);
      resolve(session.compute(step));
    } catch (error) {
      reject(error);
    }
  }

  #reserved(): number {
    return [...this.#open].reduce((pages, session) => pages + session.room.pages, 0);
  }

  #turn(pages: number, signal: AbortSignal | undefined): Promise<void> {
    return new Promise((resolve, reject) => {
      const leave = () => {
        this.#waiters.splice(this.#waiters.indexOf(waiter), 1);
        reject(signal!.reason);
      };
      const settled = () => signal?.removeEventListener("abort", leave);
      const waiter: Waiter = {
        pages,
        admit: () => (settled(), resolve()),
        refuse: () => (settled(), reject(noRoom())),
      };
      signal?.addEventListener("abort", leave, { once: true });
      this.#waiters.push(waiter);
      this.#refuseHopeless();
    });
  }

  #refuseHopeless(): void {
    const lasting = [...this.#open].reduce((sum, { room }) => sum + (room.stay === "lasting" ? room.pages : 0), 0);
    for (const waiter of this.#waiters.filter(({ pages }) => lasting + pages > this.#pages)) {
      this.#waiters.splice(this.#waiters.indexOf(waiter), 1);
      waiter.refuse();
    }
  }
}

class TinySession implements Session {
  readonly maxLength: number;
  readonly room: { readonly pages: number; readonly stay: OpenSession["stay"] };
  readonly #stage: TinyStage;
  /** What attention sees: the ids, which every layer finds in the hidden states. */
  #ids: number[];
  #isClosed = false;
  #running = 0;
  #turn: Promise<unknown> = Promise.resolve();

  constructor(
    stage: TinyStage,
    { maxLength, pages, stay }: { maxLength: number; pages: number; stay: OpenSession["stay"] },
    beginning: readonly number[],
  ) {
    this.#stage = stage;
    this.maxLength = maxLength;
    this.room = { pages, stay };
    this.#ids = [...beginning];
  }

  get length(): number {
    return this.#ids.length;
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  run(step: Step): Promise<StepOutput> {
    this.#running++;
    const result = this.#turn.then(() => this.#run(step));
    const ended = () => {
      if (--this.#running === 0 && this.#isClosed) this.#stage.closed(this);
    };
    this.#turn = result.then(ended, ended);
    return result;
  }

  cut(length: number): void {
    this.#ids.length = Math.min(this.#ids.length, length);
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    if (this.#running === 0) this.#stage.closed(this);
  }

  /** Cuts back where the step says so: from here on what was there is gone. */
  begin(step: Step): UserError | undefined {
    const problem = this.#problem(step);
    if (!problem) this.cut(step.positionStart);
    return problem;
  }

  compute({ input, positionStart, ...step }: Step): StepOutput {
    const states =
      input.kind === "ids"
        ? [...input.ids].flatMap((id, index) => [id, positionStart + index, 0, 0])
        : Array.from(input.hidden, fromBits);
    const before = this.#ids.reduce((a, b) => a + b, 0);
    const { span } = this.#stage.info;
    for (let layer = span.start; layer < span.end; layer++) runLayer(states, before, layer);
    for (let at = 0; at < states.length; at += HIDDEN) this.#ids.push(states[at]!);
    if (input.kind === "ids" || step.tokenIds) this.#stage.remember(this.#ids, positionStart);
    return this.#stage.give({ input, positionStart, ...step }, states);
  }

  async #run(step: Step): Promise<StepOutput> {
    const problem = this.#problem(step);
    if (problem) throw problem;
    const before = this.#ids.length;
    try {
      return await this.#stage.run(this, step);
    } catch (error) {
      if (this.#ids.length < before) this.close(); // cut, and nothing came of it
      throw error;
    }
  }

  #problem({ input, positionStart }: Step): UserError | undefined {
    const tokens = input.kind === "ids" ? input.ids.length : input.hidden.length / HIDDEN;
    const length = this.#isClosed ? 0 : this.length;
    if (this.#isClosed || positionStart > length) {
      return new UserError("session_lost", "the session is not here", "replay", { details: { cache_len: length } });
    }
    if (positionStart + tokens <= this.maxLength) return undefined;
    return new UserError("context_exceeded", `room for ${this.maxLength} tokens was reserved`, "end it here");
  }
}

function runLayer(states: number[], before: number, layer: number): void {
  let seen = before;
  for (let at = 0; at < states.length; at += HIDDEN) {
    seen += states[at]!;
    states[at + 2] = (states[at + 2]! + layer + 1) % 64;
    states[at + 3] = (states[at + 3]! + seen) % 64;
  }
}

const digestOf = (ids: readonly number[]): string => createHash("sha256").update(ids.join(",")).digest("hex");

const noRoom = () => new UserError("no_room", "all pages are taken", "come back later");

export const toBits = (values: readonly number[]): Uint16Array =>
  Uint16Array.from(values, (value) => new Uint32Array(Float32Array.of(value).buffer)[0]! >>> 16);

export const fromBits = (bits: number): number => new Float32Array(Uint32Array.of(bits << 16).buffer)[0]!;

/** The token that follows `ids` in the whole model, counted as one would by hand. */
export function tokenAfter(ids: readonly number[], seed = 0): number {
  const sums = ids.reduce((a, b) => a + b, 0);
  const last = [ids.at(-1)!, ids.length - 1, (1 + 2 + 3 + 4) % 64, (LAYERS * sums) % 64];
  return (last.reduce((a, b) => a + b) + seed) % VOCAB;
}

/** `ids` and what the model makes of them. */
export function continued(ids: readonly number[], count: number, seed = 0): number[] {
  const sequence = [...ids];
  for (let i = 0; i < count; i++) sequence.push(tokenAfter(sequence, seed));
  return sequence.slice(ids.length);
}
