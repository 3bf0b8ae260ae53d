import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { NodeInfo } from "../protocol/info.ts";
import { HeadClient, type TextEvent } from "./head-client.ts";
import { LoadRun, type Span } from "./load-run.ts";

export interface ServeBenchOptions {
  /** How many texts are made at a time: a measurement for each. Undefined: `USUAL_SESSIONS`, cut to the room that the head has. */
  readonly sessions: readonly number[] | undefined;
  /** Of a text, and what is measured of each session. */
  readonly tokens: number;
  readonly promptTokens: number;
  /** Of the prompt that is read in beside a running session; cut to the context. */
  readonly prefillTokens: number;
  /** Texts that are made alone, one after the other. */
  readonly runs: number;
  readonly signal: AbortSignal;
  /** Told what is measured now, and what the last measurement gave. */
  readonly onPhase?: (phase: string, last?: AloneResult | SessionsResult) => void;
}

export interface ServeBenchmark {
  readonly model: string;
  readonly nodes: readonly { readonly layers: string; readonly device: string; readonly quantization: string }[];
  readonly alone: AloneResult;
  readonly sessions: readonly SessionsResult[];
  readonly prefill: PrefillResult;
}

/** Texts that were made alone. */
export interface AloneResult {
  readonly firstTokenMs: readonly number[];
  /** Made by all of them. */
  readonly tokens: number;
  /** From the call to the end of the answer, of all of them. */
  readonly wallMs: number;
  /** Of that: in passes through the layers, of all nodes. Null where one does not tell. */
  readonly passMs: number | null;
}

/** From when all sessions had a token until each, on average, had made its tokens. */
export interface SessionsResult {
  readonly sessions: number;
  readonly tokens: number;
  readonly seconds: number;
  readonly tokensPerSecond: number;
  readonly perTokenMs: Percentiles;
  /** Of the first text of each; they were asked for at one time. */
  readonly firstTokenMs: Percentiles;
}

/** A session that runs while a long prompt is read in. */
export interface PrefillResult {
  readonly promptTokens: number;
  /** From the call to the token that follows the prompt. */
  readonly prefillMs: number;
  readonly idleMs: Percentiles;
  readonly besideMs: Percentiles;
}

export interface Percentiles {
  readonly count: number;
  readonly p50: number;
  readonly p99: number;
  readonly max: number;
}

const USUAL_SESSIONS: readonly number[] = [1, 4, 16];

/** Tokens of a text in the measurement of sessions: it shall not end before the measurement does. */
export const textTokens = ({ tokens, promptTokens }: ServeBenchOptions, maxContext: number): number =>
  Math.min(2 * tokens, maxContext - promptTokens);

/** Texts of the whole context that a node must have room for. */
export function contextsNeeded(options: ServeBenchOptions, maxContext: number): number {
  const tokens =
    Math.max(...(options.sessions ?? USUAL_SESSIONS)) *
    (options.promptTokens + textTokens(options, maxContext) + PAGE_TOKENS);
  return Math.max(2, Math.ceil(tokens / maxContext)); // two: the long prompt, and what runs beside it
}

/** A text takes whole pages. */
const PAGE_TOKENS = 32;

/**
 * Measures a chain as a program sees it that uses the head's API. Throws what `HeadClient` throws, and `bad_usage` for what does not go
 * into the context or the room for sessions.
 */
export async function benchServe(client: HeadClient, options: ServeBenchOptions): Promise<ServeBenchmark> {
  const { onPhase = () => {}, runs, signal } = options;
  const info = await client.headInfo(signal);
  if (info === undefined) {
    throw new UserError("next_nonsense", `${client.url} is no node`, "give the URL of the head itself");
  }
  const sessions = sessionsFor(options, info);
  const bench = new ServeBench(client, info, options);
  onPhase("one text that does not count");
  await bench.alone(1);
  onPhase(`${runs} texts, one after the other`);
  const alone = await bench.alone(runs);
  const together: SessionsResult[] = [];
  for (const count of sessions) {
    onPhase(`${count} at a time`, together.at(-1) ?? alone);
    together.push(await bench.together(count));
  }
  onPhase("a long prompt beside a session", together.at(-1));
  const prefill = await bench.prefill();
  const nodes = ((await nodesOf(client, signal)) ?? [info]).map(({ start, end, layers, device, quantization }) => ({
    layers: `${start}-${end} of ${layers}`,
    device,
    quantization,
  }));
  return { model: info.model_id, nodes, alone, sessions: together, prefill };
}

/** How many texts at a time are measured. Throws UserError `bad_usage` for sizes that do not go into the context or the room. */
function sessionsFor(options: ServeBenchOptions, { max_context, cache }: NodeInfo): readonly number[] {
  const { promptTokens, sessions = USUAL_SESSIONS } = options;
  if (promptTokens + 2 > max_context) {
    const problem = `--prompt-tokens ${promptTokens} leaves no room for a text: the context is ${max_context} tokens`;
    throw new UserError("bad_usage", problem, `take at most ${max_context - 2}`);
  }
  if (!cache) return sessions;
  const perText = Math.ceil((promptTokens + textTokens(options, max_context)) / cache.page_tokens) * cache.page_tokens;
  const room = cache.pages * cache.page_tokens;
  const most = Math.max(...sessions);
  const goIn = Math.floor(room / perText);
  if (most <= goIn) return sessions;
  if (options.sessions === undefined && goIn >= 1) return [...new Set(sessions.map((count) => Math.min(count, goIn)))];
  throw new UserError(
    "bad_usage",
    `${most} texts of ${perText} tokens at a time need ${most * perText} tokens of room, and the head has ${room}`,
    `take at most ${goIn} --sessions, fewer --tokens, or start the nodes with a larger --max-sessions`,
  );
}

class ServeBench {
  readonly #client: HeadClient;
  readonly #info: NodeInfo;
  readonly #options: ServeBenchOptions;
  #texts = 0;

  constructor(client: HeadClient, info: NodeInfo, options: ServeBenchOptions) {
    this.#client = client;
    this.#info = info;
    this.#options = options;
  }

  async alone(runs: number): Promise<AloneResult> {
    const { promptTokens, tokens, signal } = this.#options;
    const maxTokens = Math.min(tokens, this.#info.max_context - promptTokens);
    const firstTokenMs: number[] = [];
    let made = 0;
    let wallMs = 0;
    const before = await this.#passMs();
    for (let run = 0; run < runs; run++) {
      const asked = performance.now();
      let first: number | undefined;
      for await (const { usage } of this.#text(promptTokens, maxTokens, signal)) {
        first ??= performance.now() - asked;
        made += usage?.completion ?? 0;
      }
      wallMs += performance.now() - asked;
      firstTokenMs.push(first!);
    }
    const after = await this.#passMs();
    const passMs = before === undefined || after === undefined ? null : after - before;
    return { firstTokenMs, tokens: made, wallMs, passMs };
  }

  async together(sessions: number): Promise<SessionsResult> {
    const { tokens } = this.#options;
    const length = textTokens(this.#options, this.#info.max_context);
    return this.#during(sessions, length, async (run) => {
      await run.until(() => run.firstMs.every((ms) => ms !== undefined));
      const begin = performance.now();
      await run.until(() => run.within({ begin, end: Infinity }).length >= sessions * tokens);
      const gaps = run.within({ begin, end: Infinity });
      const seconds = (run.lastAt - begin) / 1000;
      return {
        sessions,
        tokens: gaps.length,
        seconds,
        tokensPerSecond: gaps.length / seconds,
        perTokenMs: percentiles(gaps.map(lengthOf)),
        firstTokenMs: percentiles(run.firstMs.map((ms) => ms!)),
      };
    });
  }

  async prefill(): Promise<PrefillResult> {
    const { tokens, promptTokens, prefillTokens, signal } = this.#options;
    const { max_context } = this.#info;
    return this.#during(1, max_context - promptTokens, async (run) => {
      await run.until(() => run.firstMs[0] !== undefined);
      const idle = performance.now();
      await run.until(() => run.within({ begin: idle, end: Infinity }).length >= tokens);
      const begin = performance.now();
      const long = Math.min(prefillTokens, max_context - 1);
      const end = await Promise.race([this.#readIn(long, signal), run.failure]);
      await run.until(() => run.lastAt >= end); // the token that was under way is one of them
      return {
        promptTokens: long,
        prefillMs: end - begin,
        idleMs: percentiles(run.within({ begin: idle, end: begin }).map(lengthOf)),
        besideMs: percentiles(run.touching({ begin, end }).map(lengthOf)),
      };
    });
  }

  /** When the token came that follows a prompt. */
  async #readIn(promptTokens: number, signal: AbortSignal): Promise<number> {
    let at: number | undefined;
    for await (const _ of this.#text(promptTokens, 1, signal)) at ??= performance.now();
    return at!;
  }

  async #during<T>(sessions: number, length: number, measure: (run: LoadRun) => Promise<T>): Promise<T> {
    const { promptTokens, signal } = this.#options;
    const run = new LoadRun(sessions, (whole) => this.#text(promptTokens, length, whole), signal);
    try {
      return await measure(run);
    } finally {
      await run.stop();
      await this.#untilFree();
    }
  }

  /** A greedy text. No two prompts begin alike: nothing of one is in the cache for another. */
  #text(promptTokens: number, maxTokens: number, signal: AbortSignal): AsyncGenerator<TextEvent> {
    const prompt = randomIds(promptTokens, this.#info.vocab_size, ++this.#texts);
    return this.#client.text({ prompt }, { max_tokens: maxTokens, temperature: 0 }, signal);
  }

  /** What was broken off leaves the nodes with the pass that it is in. */
  async #untilFree(): Promise<void> {
    const end = performance.now() + FREE_MS;
    while (performance.now() < end) {
      const info = await this.#client.info(this.#options.signal);
      if ((info?.cache?.reserved_pages ?? 0) === 0) return;
      await Bun.sleep(20);
    }
  }

  /** Of all nodes since their start; undefined where one does not tell. */
  async #passMs(): Promise<number | undefined> {
    const times = (await nodesOf(this.#client, this.#options.signal))?.map(({ work }) => work?.pass_ms);
    return times?.every((ms) => ms !== undefined) ? sum(times) : undefined;
  }
}

/** Others may use the chain too: then nothing is waited for. */
const FREE_MS = 10_000;
/** A chain that is longer goes round. */
const MOST_NODES = 256;

/** The nodes of a chain, from the head on; undefined where one cannot be asked from here. */
async function nodesOf(head: HeadClient, signal: AbortSignal): Promise<NodeInfo[] | undefined> {
  const nodes: NodeInfo[] = [];
  try {
    for (let client: HeadClient | undefined = head; client && nodes.length < MOST_NODES;) {
      const info: NodeInfo | undefined = await client.info(signal);
      if (info === undefined) return undefined;
      nodes.push(info);
      client = info.next === null ? undefined : new HeadClient(info.next);
    }
    return nodes;
  } catch (error) {
    signal.throwIfAborted();
    if (error instanceof UserError) return undefined;
    throw error;
  }
}

const lengthOf = ({ begin, end }: Span): number => end - begin;

/** By nearest rank. */
export function percentiles(values: readonly number[]): Percentiles {
  const sorted = values.toSorted((a, b) => a - b);
  const at = (part: number) => sorted[Math.max(0, Math.ceil(part * sorted.length) - 1)] ?? Number.NaN;
  return { count: sorted.length, p50: at(0.5), p99: at(0.99), max: at(1) };
}

/** From the first half of the vocabulary: what is special is at its end. The multiplier is Knuth's. */
function randomIds(count: number, vocabSize: number, seed: number): number[] {
  const half = Math.max(1, Math.floor(vocabSize / 2));
  return Array.from({ length: count }, (_, i) => (Math.imul(seed * 65_537 + i + 1, 2_654_435_761) >>> 8) % half);
}
