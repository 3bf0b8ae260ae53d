import { ceilDiv } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { PAGE_TOKENS } from "../nn/index.ts";
import { checkValues } from "./check.ts";
import type { PageCache, Prefix } from "./page-cache.ts";
import { pageDigest } from "./prefix.ts";
import type { Job } from "./scheduler.ts";
import type { Session, StageInfo, Step, StepOutput } from "./types.ts";

export interface SessionParts {
  readonly cache: PageCache;
  readonly maxLength: number;
  readonly info: StageInfo;
  /** Its pages are reserved; `end` gives them back. */
  readonly end: () => void;
  readonly run: (job: Job) => Promise<StepOutput>;
  /** Records a copy of a page's keys and values, in all layers. */
  readonly copyPage: (from: number, to: number) => void;
  readonly prefix?: Prefix;
}

/** [n] The ids of a step's tokens, where they are known. */
export const idsOf = ({ input, tokenIds }: Step): Int32Array | undefined =>
  input.kind === "ids" ? input.ids : tokenIds;

export class StageSession implements Session {
  readonly maxLength: number;
  readonly #parts: SessionParts;
  readonly #pages: number[];
  /** Of the full pages whose ids are known, from the first on. */
  readonly #digests: string[];
  /** The ids of the tokens held, as far as they are known without a gap. */
  #ids: Int32Array;
  #known: number;
  #length: number;
  #isClosed = false;
  #isFreed = false;
  #running = 0;
  #turn: Promise<unknown> = Promise.resolve();

  constructor(parts: SessionParts) {
    const { prefix } = parts;
    this.#parts = parts;
    this.maxLength = parts.maxLength;
    this.#pages = [...(prefix?.pages ?? [])];
    this.#digests = [...(prefix?.digests ?? [])];
    this.#length = this.#known = prefix?.ids.length ?? 0;
    this.#ids = new Int32Array(Math.max(PAGE_TOKENS, this.#known));
    this.#ids.set(prefix?.ids ?? []);
  }

  get length(): number {
    return this.#length;
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  run(step: Step): Promise<StepOutput> {
    this.#running++;
    const result = this.#turn.then(() => this.#run(step));
    this.#turn = result.then(
      () => this.#ended(),
      () => this.#ended(),
    );
    return result;
  }

  cut(length: number): void {
    if (length >= this.#length) return;
    this.#dropPagesBehind(length);
    this.#digests.splice(Math.floor(length / PAGE_TOKENS));
    this.#known = Math.min(this.#known, length);
    this.#length = length;
  }

  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    if (this.#running === 0) this.#free();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** A pass may still write into the pages of a session that was closed meanwhile. */
  #ended(): void {
    if (--this.#running === 0 && this.#isClosed) this.#free();
  }

  #free(): void {
    if (this.#isFreed) return;
    this.#isFreed = true;
    this.cut(0);
    this.#parts.end();
  }

  async #run(step: Step): Promise<StepOutput> {
    step.signal?.throwIfAborted();
    const tokens = this.#check(step);
    const before = this.#length;
    let hasBegun = false;
    const job: Job = {
      step,
      tokens,
      begin: () => {
        this.#checkOpen(step);
        hasBegun = true;
        this.cut(step.positionStart);
        this.#takePages(step.positionStart, step.positionStart + tokens);
      },
      pages: () => this.#pages,
      history: () => (this.#known === step.positionStart ? this.#ids.subarray(0, this.#known) : undefined),
    };
    try {
      const output = await this.#parts.run(job);
      this.#length = step.positionStart + tokens;
      this.#remember(step);
      return output;
    } catch (error) {
      // What the step wrote over is gone; what lay behind the end was nothing.
      if (hasBegun && step.positionStart < before) this.close();
      else if (hasBegun) this.#dropPagesBehind(this.#length);
      throw error;
    }
  }

  /** @returns the tokens of the step */
  #check(step: Step): number {
    const { input, positionStart } = step;
    this.#checkOpen(step);
    const tokens = checkValues(input, this.#parts.info);
    const isPenalized = (step.sampling?.repetition_penalty ?? 1) !== 1;
    if (isPenalized && step.want === "token" && (this.#known < positionStart || idsOf(step)?.length !== tokens)) {
      throw new UserError(
        "impossible",
        `repetition_penalty ${step.sampling!.repetition_penalty} needs the ids of all tokens so far, and they did not come with them`,
        "send token_ids with every call of the session, or leave the penalty away",
      );
    }
    if (positionStart + tokens <= this.maxLength) return tokens;
    throw new UserError(
      "context_exceeded",
      `the sequence would have ${positionStart + tokens} tokens, and room for ${this.maxLength} was reserved`,
      "end it here, or open a session with a larger max_len",
    );
  }

  #checkOpen({ positionStart }: Step): void {
    if (!this.#isClosed && positionStart <= this.#length) return;
    const held = this.#isClosed ? 0 : this.#length;
    throw new UserError(
      "session_lost",
      `the step begins after ${positionStart} tokens, and ${held} are held here`,
      `send the sequence again from position ${held} on`,
      { details: { cache_len: held } },
    );
  }

  /** Pages for the tokens [start, end), of which no other sequence sees anything. */
  #takePages(start: number, end: number): void {
    const { cache, copyPage } = this.#parts;
    const at = Math.floor(start / PAGE_TOKENS);
    const first = this.#pages[at];
    if (first !== undefined && !cache.own(first)) {
      const copy = cache.take();
      copyPage(first, copy);
      cache.release(first);
      this.#pages[at] = copy;
    }
    while (this.#pages.length * PAGE_TOKENS < end) this.#pages.push(cache.take());
  }

  /** The last ones first: a sequence's beginning is worth keeping for longest. */
  #dropPagesBehind(length: number): void {
    for (const page of this.#pages.splice(ceilDiv(length, PAGE_TOKENS)).toReversed()) this.#parts.cache.release(page);
  }

  /** Notes the ids of a step that went well, and lets other sequences begin with pages that are full now. */
  #remember(step: Step): void {
    const { positionStart } = step;
    const ids = idsOf(step);
    if (ids === undefined || this.#known !== positionStart) return;
    if (this.#ids.length < positionStart + ids.length) {
      const grown = new Int32Array(Math.max(2 * this.#ids.length, positionStart + ids.length));
      grown.set(this.#ids.subarray(0, positionStart));
      this.#ids = grown;
    }
    this.#ids.set(ids, positionStart);
    this.#known = positionStart + ids.length;
    for (let page = this.#digests.length; (page + 1) * PAGE_TOKENS <= this.#known; page++) {
      const own = this.#ids.slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS);
      const before = this.#digests[page - 1];
      const digest = pageDigest(before, own);
      this.#digests.push(digest);
      this.#parts.cache.publish(this.#pages[page]!, digest, before, own);
    }
  }
}
