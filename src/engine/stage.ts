import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { isHead } from "../base/span.ts";
import type { Commands } from "../gpu/commands.ts";
import type { Tensor, TensorStore } from "../gpu/tensor.ts";
import type { Model } from "../models/index.ts";
import { PAGE_TOKENS, rowStepOf } from "../nn/index.ts";
import { isDrawn } from "../protocol/sampling.ts";
import { bf16ArrayToF32 } from "../quant/bf16.ts";
import { MAX_ROWS } from "../weights/plan.ts";
import { DevicePass, type PassRow } from "./device-pass.ts";
import type { EdgePipelines, StageSource } from "./open-stage.ts";
import { PageCache } from "./page-cache.ts";
import { pageDigest } from "./prefix.ts";
import { Room } from "./room.ts";
import { sampleToken } from "./sampler.ts";
import { type Job, Scheduler, type Slice } from "./scheduler.ts";
import { idsOf, StageSession } from "./session.ts";
import type {
  CacheUse,
  OpenSession,
  Session,
  Stage,
  StageInfo,
  StageInput,
  StageOutput,
  StageWork,
  Step,
  StepOutput,
  Want,
} from "./types.ts";

/** A span of layers on a device, with room for sequences. */
export class GpuStage implements Stage {
  readonly info: StageInfo;
  readonly #cache: PageCache;
  readonly #room: Room;
  readonly #scheduler: Scheduler;
  readonly #pass: DevicePass;
  #sessions = 0;
  #prefixHits = 0;
  #prefixTokens = 0;

  constructor(
    private readonly source: StageSource,
    model: Model,
    edges: EdgePipelines,
    private readonly store: TensorStore,
    private readonly commands: Commands,
    private readonly buffers: ReadonlyMap<string, Tensor>,
  ) {
    const { config, plan, eosTokenIds } = source;
    this.info = {
      span: plan.options.span,
      hiddenSize: config.hiddenSize,
      vocabSize: config.vocabSize,
      maxContext: plan.options.maxContext,
      eosTokenIds,
    };
    this.#cache = new PageCache(plan.pages);
    this.#room = new Room(this.#cache);
    this.#pass = new DevicePass({ info: this.info, model, edges, store, commands, buffers });
    this.#scheduler = new Scheduler({
      run: (slices) => this.#run(slices),
      passTokens: plan.maxTokens,
      maxRows: MAX_ROWS,
      rowStep: rowStepOf(source.device),
      oneCallPerPass: plan.options.int8Activations,
    });
  }

  /** Bytes on the device, as allocated. */
  get allocatedBytes(): number {
    return this.store.allocatedBytes + this.commands.allocatedBytes;
  }

  get cacheUse(): CacheUse {
    return {
      pageTokens: PAGE_TOKENS,
      pages: this.#cache.pages,
      reservedPages: this.#cache.reserved,
      sessions: this.#sessions,
      prefixHits: this.#prefixHits,
      prefixTokens: this.#prefixTokens,
    };
  }

  get waiting(): number {
    return this.#scheduler.waiting;
  }

  get work(): StageWork {
    return this.#scheduler.work;
  }

  get passMs(): number {
    return this.#scheduler.passMs;
  }

  async open(wanted: OpenSession): Promise<Session> {
    const { maxLength } = wanted;
    if (maxLength > this.info.maxContext) throw contextExceeded(maxLength, this.info.maxContext);
    const giveBack = await this.#room.reserve(wanted);
    const prefix = wanted.prefix === undefined ? undefined : this.#cache.share(wanted.prefix);
    if (wanted.prefix !== undefined) {
      if (!prefix || prefix.ids.length >= maxLength) {
        for (const page of prefix?.pages ?? []) this.#cache.release(page);
        giveBack();
        throw prefixLost(wanted.prefix);
      }
      this.#prefixHits++;
      this.#prefixTokens += prefix.ids.length;
    }
    this.#sessions++;
    return new StageSession({
      cache: this.#cache,
      maxLength,
      info: this.info,
      prefix,
      run: (job) => this.#scheduler.run(job),
      copyPage: (from, to) => this.#copyPage(from, to),
      end: () => {
        this.#sessions--;
        giveBack();
      },
    });
  }

  longestPrefix(ids: Int32Array): { tokens: number; prefix?: string } {
    let prefix: string | undefined;
    let tokens = 0;
    while (tokens + PAGE_TOKENS <= ids.length) {
      const digest = pageDigest(prefix, ids.subarray(tokens, tokens + PAGE_TOKENS));
      if (!this.#cache.isPublished(digest)) break;
      prefix = digest;
      tokens += PAGE_TOKENS;
    }
    return { tokens, prefix };
  }

  /** Runs whole sequences, all at once where there is room, of which nothing is kept. */
  async forward(input: StageInput, want: Want, signal?: AbortSignal): Promise<StageOutput> {
    const call = {};
    const rows = splitRows(input, this.info.hiddenSize).map(async ({ tokens, ...rest }, row) => {
      const session = await this.open({ maxLength: tokens, stay: "passing", signal });
      try {
        return await session.run({ ...rest, positionStart: 0, want, call, signal });
      } catch (error) {
        throw error instanceof UserError ? atRow(error, row) : error;
      } finally {
        session.close();
      }
    });
    const settled = await Promise.allSettled(rows);
    const failed = settled.find((result) => result.status === "rejected");
    if (failed) throw failed.reason;
    return joinRows(settled.map((result) => (result as PromiseFulfilledResult<StepOutput>).value));
  }

  destroy(): void {
    this.store.destroyAll();
    this.commands.destroy();
  }

  /**
   * Runs every kernel once, so that a driver that compiles at first use does so before the node says that it is ready;
   * and looks whether the driver's compiler kept the order of addition: a token must be the same whether it comes with
   * others of its sequence, through the kernels for many rows, or alone beside another sequence's.
   */
  async warmUp(): Promise<{ keepsOrder: boolean }> {
    const { span, hiddenSize, vocabSize, maxContext } = this.info;
    // From a page of the cache into the next, where there are two. What lies before the first token there is zero.
    const positionStart = Math.max(0, Math.min(PAGE_TOKENS - 4, maxContext - WARM_UP_TOKENS));
    const tokens = Math.min(WARM_UP_TOKENS, maxContext);
    const pages = [0, 1];
    const numbers = Uint32Array.from({ length: tokens * hiddenSize }, (_, i) => (i * 2_654_435_761) >>> 0);
    const row = (first: number, end: number): PassRow => ({
      tokens: end - first,
      positionStart: positionStart + first,
      pages,
      want: "logits",
      ...(isHead(span)
        ? { ids: Int32Array.from(numbers.subarray(first, end), (number) => number % vocabSize) }
        : { hidden: Uint16Array.from(numbers.subarray(first * hiddenSize, end * hiddenSize), smallBf16) }),
    });
    const company = { ...row(0, 1), positionStart: 0, pages: [this.#cache.pages - 1] };

    const [together] = await this.#checked(() => this.#pass.run([row(0, tokens)]));
    if (tokens === 1) return { keepsOrder: true };
    await this.#checked(() => this.#pass.run([row(0, tokens - 1)]));
    const hasCompany = this.#cache.pages > pages.length;
    const last = [row(tokens - 1, tokens), ...(hasCompany ? [company] : [])];
    const [alone] = await this.#checked(() => this.#pass.run(last));
    return { keepsOrder: sameEnd(together!, alone!) };
  }

  #run(slices: readonly Slice[]): Promise<(StepOutput | Error)[]> {
    return this.#checked(() => this.#pass.run(slices.map((slice) => this.#rowOf(slice))));
  }

  /** A GPU error does not throw where it happens: without a look at the counts, zeros would pass for results. */
  async #checked<T>(pass: () => Promise<T>): Promise<T> {
    const { device } = this.source;
    const { uncapturedErrors, outOfMemoryErrors } = device;
    const [result] = await Promise.allSettled([pass()]);
    if (device.outOfMemoryErrors > outOfMemoryErrors) throw outOfMemory(device.info.name);
    if (result.status === "rejected") throw result.reason;
    if (device.uncapturedErrors === uncapturedErrors) return result.value;
    throw new Error(`${device.info.name} reported an error in this pass: the log has it`);
  }

  #rowOf({ job, first, tokens, want }: Slice): PassRow {
    const { input, positionStart } = job.step;
    const draw = want === "token" ? drawOf(job) : undefined;
    const row = { tokens, positionStart: positionStart + first, pages: job.pages(), want, draw };
    const end = first + tokens;
    if (input.kind === "ids") return { ...row, ids: input.ids.subarray(first, end) };
    const { hiddenSize } = this.info;
    return { ...row, hidden: input.hidden.subarray(first * hiddenSize, end * hiddenSize) };
  }

  #copyPage(from: number, to: number): void {
    const between = this.buffers.get("upload")!; // a buffer cannot be copied to itself
    for (const { label } of this.source.plan.buffers.filter(({ paged }) => paged)) {
      const cache = this.buffers.get(label)!;
      const bytes = cache.rowBytes * PAGE_TOKENS;
      this.commands.copy(cache, from * bytes, between, 0, bytes);
      this.commands.copy(between, 0, cache, to * bytes, bytes);
    }
  }
}

/** How the host draws a job's token; undefined: the device takes the likeliest. */
function drawOf({ step, tokens, history }: Job): PassRow["draw"] {
  const { sampling = {}, positionStart } = step;
  const isPenalized = (sampling.repetition_penalty ?? 1) !== 1;
  if (!isDrawn(sampling) && !isPenalized && sampling.logprobs === undefined) return undefined;
  const ids = isPenalized ? [...history()!, ...idsOf(step)!] : [];
  return (logits) => ({
    kind: "token",
    ...sampleToken(bf16ArrayToF32(logits), sampling, { history: ids, position: positionStart + tokens }),
  });
}

/** One more than the kernels for few rows take. */
const WARM_UP_TOKENS = 9;

/** A bfloat16 between 1/8 and 1, or its negative, from any whole number. */
const smallBf16 = (number: number): number => 0x3e00 + ((number >>> 8) % 0x180) + (number % 2) * 0x8000;

/** Whether two outputs end with the same values, as many as the shorter has. */
function sameEnd(a: StepOutput | Error, b: StepOutput | Error): boolean {
  if (!("values" in a && "values" in b)) return false;
  const length = Math.min(a.values.length, b.values.length);
  return a.values.subarray(-length).every((value, i) => value === b.values.at(i - length));
}

const outOfMemory = (device: string): UserError =>
  new UserError(
    "does_not_fit",
    `${device} had no memory left in this pass`,
    "another program may have taken it: try again, or start the node with fewer layers, sessions or a shorter context",
  );

const contextExceeded = (tokens: number, maxContext: number): UserError =>
  new UserError(
    "context_exceeded",
    `${tokens} tokens are asked for, and the context is ${maxContext}`,
    "send a shorter sequence, or start the node with a larger --max-context",
  );

const prefixLost = (prefix: string): UserError =>
  new UserError(
    "session_lost",
    `the beginning ${prefix.slice(0, 12)}… is not in the cache any more`,
    "send the sequence from position 0",
    { details: { cache_len: 0 } },
  );

const atRow = (error: UserError, row: number): UserError =>
  new UserError(error.code, error.message, error.hint, { cause: error, details: { ...error.details, row } });

function splitRows(input: StageInput, hiddenSize: number): { tokens: number; input: Step["input"] }[] {
  let first = 0;
  return input.rows.map(({ tokens }) => {
    const end = first + tokens;
    const row: Step["input"] =
      input.kind === "ids"
        ? { kind: "ids", ids: input.ids.subarray(first, end) }
        : { kind: "hidden", hidden: input.hidden.subarray(first * hiddenSize, end * hiddenSize) };
    first = end;
    return { tokens, input: row };
  });
}

function joinRows(outputs: readonly StepOutput[]): StageOutput {
  const first = outputs[0]!;
  if (first.kind === "none") return first;
  if (first.kind === "token") return { kind: "token", ids: outputs.flatMap((o) => (o.kind === "token" ? o.id : [])) };
  const parts = outputs.flatMap((output) => ("values" in output ? [output.values] : []));
  const values = new Uint16Array(sum(parts.map((part) => part.length)));
  let at = 0;
  for (const part of parts) {
    values.set(part, at);
    at += part.length;
  }
  return { kind: first.kind, values };
}
