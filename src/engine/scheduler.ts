import { Pace } from "./pace.ts";
import type { StageWork, Step, StepOutput, Want } from "./types.ts";

/** A step on its way through passes. */
export interface Job {
  readonly step: Step;
  readonly tokens: number;
  /** Called before its first pass. Throws: the step ends with it. */
  begin(): void;
  /** The cache pages of its sequence, from `begin` on. */
  pages(): readonly number[];
  /** Ids of the sequence before its tokens, as far as they are known: from `begin` on. */
  history(): Int32Array | undefined;
}

/** Some of a job's tokens, in one pass. */
export interface Slice {
  readonly job: Job;
  /** First of its tokens in this pass. */
  readonly first: number;
  readonly tokens: number;
  /** What its last token here shall give: before the job's last slice only what each token gives. */
  readonly want: Want;
}

/** Runs a pass; for every slice what it gives, or why it has nothing. */
export type RunPass = (slices: readonly Slice[]) => Promise<(StepOutput | Error)[]>;

export interface SchedulerOptions {
  readonly run: RunPass;
  /** The most tokens of a pass. */
  readonly passTokens: number;
  readonly maxRows: number;
  /** Exact LLM.int8() looks at all tokens of a pass together: only those of one call may meet in it. */
  readonly oneCallPerPass?: boolean;
  /** Rows that the device takes together. Default: 1. */
  readonly rowStep?: number;
  readonly now?: () => number;
}

interface Entry {
  readonly job: Job;
  /** Tokens that have been through a pass. */
  done: number;
  readonly outputs: StepOutput[];
  inPass: boolean;
  readonly resolve: (output: StepOutput) => void;
  readonly reject: (reason: unknown) => void;
}

/**
 * Merges the steps that wait into passes. Conversations come first, one token each; prompts share what is left, a part
 * of each in turn, and beside conversations no more than keeps these going.
 */
export class Scheduler {
  readonly #options: SchedulerOptions;
  readonly #pace: Pace;
  readonly #now: () => number;
  #entries: Entry[] = [];
  #isWorking = false;
  #passSince: number | undefined;
  #work = { passes: 0, ms: 0 };

  constructor(options: SchedulerOptions) {
    this.#options = options;
    this.#now = options.now ?? (() => performance.now());
    this.#pace = new Pace(this.#now, options.rowStep);
  }

  /** Steps that run or wait. */
  get waiting(): number {
    return this.#entries.length;
  }

  /** Passes that are over. */
  get work(): StageWork {
    return this.#work;
  }

  /** How long the pass that runs has been running; 0 where none does. */
  get passMs(): number {
    return this.#passSince === undefined ? 0 : Math.max(this.#now() - this.#passSince, Number.MIN_VALUE);
  }

  /** Runs a step. Rejects with the signal's reason: at once while it waits, after the pass that it is in. */
  run(job: Job): Promise<StepOutput> {
    const { signal } = job.step;
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason);
      const abort = () => {
        if (!entry.inPass) this.#end(entry, () => reject(signal!.reason));
      };
      const settled = () => signal?.removeEventListener("abort", abort);
      const entry: Entry = {
        job,
        done: 0,
        outputs: [],
        inPass: false,
        resolve: (output) => (settled(), resolve(output)),
        reject: (reason) => (settled(), reject(reason)),
      };
      signal?.addEventListener("abort", abort);
      this.#entries.push(entry);
      if (!this.#isWorking) void this.#runPasses();
    });
  }

  async #runPasses(): Promise<void> {
    this.#isWorking = true;
    // Whoever was answered by the last pass gets the turn to come with the next step, so that it shares the next pass.
    for (await turn(); this.#entries.length > 0; await turn()) await this.#pass();
    this.#isWorking = false;
  }

  async #pass(): Promise<void> {
    const chosen = this.#begun(choose(this.#entries, this.#options, (singles) => this.#pace.promptTokens(singles)));
    if (chosen.length === 0) return;
    for (const { entry } of chosen) entry.inPass = true;
    this.#passSince = this.#now();
    const [result] = await Promise.allSettled([this.#options.run(chosen.map(({ slice }) => slice))]);
    const singles = chosen.filter(({ entry }) => isSingle(entry)).length;
    const promptTokens = chosen.reduce((total, { slice }) => total + slice.tokens, 0) - singles;
    const ms = this.#now() - this.#passSince;
    this.#work = { passes: this.#work.passes + 1, ms: this.#work.ms + ms };
    if (result.status === "fulfilled") this.#pace.observe(singles, promptTokens, ms);
    this.#passSince = undefined;

    for (const [index, { entry, slice }] of chosen.entries()) {
      entry.inPass = false;
      const output = result.status === "fulfilled" ? result.value[index]! : result.reason;
      this.#take(entry, slice, output);
    }
  }

  /** Those that could begin; the others end here. */
  #begun(chosen: readonly Chosen[]): Chosen[] {
    return chosen.filter(({ entry, slice }) => {
      if (slice.first > 0) return true;
      try {
        entry.job.begin();
        return true;
      } catch (reason) {
        this.#end(entry, () => entry.reject(reason));
        return false;
      }
    });
  }

  #take(entry: Entry, slice: Slice, output: unknown): void {
    const { signal } = entry.job.step;
    if (isOutput(output)) {
      entry.done += slice.tokens;
      entry.outputs.push(output);
      if (entry.done === entry.job.tokens) this.#end(entry, () => entry.resolve(joinOutputs(entry.outputs)));
      else if (signal?.aborted) this.#end(entry, () => entry.reject(signal.reason));
      else this.#entries = [...this.#entries.filter((other) => other !== entry), entry]; // the others' turn
    } else this.#end(entry, () => entry.reject(output));
  }

  #end(entry: Entry, tell: () => void): void {
    this.#entries = this.#entries.filter((other) => other !== entry);
    tell();
  }
}

interface Chosen {
  readonly entry: Entry;
  readonly slice: Slice;
}

const isOutput = (output: unknown): output is StepOutput => !(output instanceof Error) && Object(output) === output;

const isSingle = ({ job }: Entry): boolean => job.tokens === 1;

/** The slices of the next pass. */
function choose(
  entries: readonly Entry[],
  { passTokens, maxRows, oneCallPerPass }: SchedulerOptions,
  promptTokens: (singles: number) => number,
): Chosen[] {
  const lead = entries[0]; // the oldest says which kind of input this pass takes
  if (!lead) return [];
  const fits = entries.filter(
    ({ job: { step } }) =>
      step.input.kind === lead.job.step.input.kind && (!oneCallPerPass || step.call === lead.job.step.call),
  );
  const singles = fits.filter(isSingle).slice(0, Math.min(passTokens, maxRows));
  const chosen = singles.map((entry) => ({ entry, slice: sliceOf(entry, 1) }));

  const prompts = fits.filter((entry) => !isSingle(entry)).slice(0, maxRows - singles.length);
  // A call that must stay together is not held back for others.
  const allowed = oneCallPerPass ? Infinity : promptTokens(singles.length);
  let left = Math.min(passTokens - singles.length, allowed);
  for (const [index, entry] of prompts.entries()) {
    const share = oneCallPerPass ? left : Math.ceil(left / (prompts.length - index));
    const tokens = Math.min(share, left, entry.job.tokens - entry.done);
    if (tokens < 1) continue;
    chosen.push({ entry, slice: sliceOf(entry, tokens) });
    left -= tokens;
  }
  return chosen;
}

function sliceOf({ job, done }: Entry, tokens: number): Slice {
  const { want } = job.step;
  const isLast = done + tokens === job.tokens;
  return { job, first: done, tokens, want: isLast || want === "hidden" || want === "all_logits" ? want : "none" };
}

/** One output of all that a step's slices gave: every token's values, or what the last one gave. */
function joinOutputs(outputs: readonly StepOutput[]): StepOutput {
  const last = outputs.at(-1)!;
  if (outputs.length === 1 || !(last.kind === "hidden" || last.kind === "all_logits")) return last;
  const parts = outputs.flatMap((output) => ("values" in output ? [output.values] : []));
  const values = new Uint16Array(parts.reduce((length, part) => length + part.length, 0));
  let at = 0;
  for (const part of parts) {
    values.set(part, at);
    at += part.length;
  }
  return { kind: last.kind, values };
}

const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));
