import { randomBytes } from "node:crypto";
import { UserError } from "../base/errors.ts";
import { RemoteError } from "../protocol/error-reply.ts";
import type { Logprobs } from "../protocol/reply.ts";
import { isDrawn, type Sampling } from "../protocol/sampling.ts";
import type { RowReply, RowRunner } from "./rows.ts";

export interface GenerateTokensOptions {
  /** The prompt, at least one token. */
  readonly ids: Int32Array;
  readonly maxNewTokens: number;
  /** Absent: greedy. Without a seed one is made. */
  readonly sampling?: Sampling;
  /** Tokens that end the text beside the model's own. */
  readonly stopTokenIds?: readonly number[];
  readonly signal: AbortSignal;
  /** Of a head. */
  readonly runner: RowRunner;
  /** Told with how many tokens of the prompt, which the chain has already, the session begins; not told where it has none. */
  readonly onPrefix?: (tokens: number) => void;
  readonly requestId?: string;
  /** When the caller's patience is at its end, in `performance.now()`. */
  readonly deadline?: number;
}

export interface MadeToken {
  readonly id: number;
  /** `stop`: it ends the text, `length`: there is no room for another one. */
  readonly finish: null | "stop" | "length";
  readonly logprobs?: Logprobs;
}

/** Tokens of a prompt that are read in at a time: so long no other session has to wait for a frame of it. */
const PREFILL_TOKENS = 512;
/** How often a sequence is read in again because a node has lost it. */
const MOST_REPLAYS = 2;

/**
 * Continues `ids` token by token, in a session of its own along the chain, which is ended in any case: when the text is at
 * its end, when the caller stops early (`return` of the generator, or the signal) and after an error. Where a node loses
 * the session, the sequence is read in again: the numbers are the same, so the text goes on as if nothing had been.
 *
 * Throws UserError `empty_prompt` or `context_exceeded`, and what `RowRunner.run` does.
 */
export async function* generateTokens(options: GenerateTokensOptions): AsyncGenerator<MadeToken> {
  const { ids, maxNewTokens, runner } = options;
  const { maxContext } = runner;
  checkPrompt(ids, maxContext);
  if (maxNewTokens < 1) return;
  const most = Math.min(maxNewTokens, maxContext - ids.length + 1); // the last one is not read in again
  const sequence = new Int32Array(ids.length + most);
  sequence.set(ids);
  const session = new GenerationSession(options, ids.length + most - 1);
  try {
    for (let length = ids.length; length < ids.length + most; length++) {
      const token = await session.next(sequence.subarray(0, length));
      sequence[length] = token.id;
      const isLast = length + 1 === ids.length + most;
      yield { ...token, finish: token.finish ?? (isLast ? "length" : null) };
      if (token.finish === "stop") return;
    }
  } finally {
    session.end();
  }
}

function checkPrompt(ids: Int32Array, maxContext: number): void {
  if (ids.length === 0) throw new UserError("empty_prompt", "the prompt has no token", "send at least one token");
  if (ids.length <= maxContext) return;
  throw new UserError(
    "context_exceeded",
    `the prompt has ${ids.length} tokens, and the context is ${maxContext}`,
    "send a shorter prompt",
  );
}

/** One sequence in the chain, whatever happens to the sessions that hold it. */
class GenerationSession {
  readonly #options: GenerateTokensOptions;
  readonly #maxLen: number;
  readonly #sampling: Sampling | undefined;
  readonly #requestId: string;
  #id = sessionId();
  #step = 0;
  /** Tokens that the chain holds. */
  #length = 0;
  #usesPrefix = true;
  #replays = 0;

  constructor(options: GenerateTokensOptions, maxLen: number) {
    this.#options = options;
    this.#maxLen = maxLen;
    this.#sampling = samplingOf(options);
    this.#requestId = options.requestId ?? crypto.randomUUID();
  }

  /** Reads in what the chain does not hold of `sequence`, and gives the token that follows. */
  async next(sequence: Int32Array): Promise<MadeToken> {
    for (;;) {
      try {
        return await this.#advance(sequence);
      } catch (error) {
        if (!isLost(error) || this.#replays >= MOST_REPLAYS) throw error;
        // A prefix that is no longer everywhere costs nothing: nothing had been read in.
        if (this.#length > 0 || !this.#usesPrefix) this.#replays++;
        this.#usesPrefix = false;
        this.end();
        this.#id = sessionId(); // nodes that still have the old one cannot mistake the one for the other
        this.#length = 0;
      }
    }
  }

  end(): void {
    this.#options.runner.forgetSession(this.#id);
  }

  async #advance(sequence: Int32Array): Promise<MadeToken> {
    let prefix = this.#length === 0 ? this.#prefixOf(sequence) : undefined;
    while (true) {
      const start = prefix?.tokens ?? this.#length;
      const end = Math.min(start + PREFILL_TOKENS, sequence.length);
      const isLast = end === sequence.length;
      const { result } = await this.#run(sequence.subarray(start, end), start, isLast, prefix?.digest);
      if (this.#step === 1 && prefix) this.#options.onPrefix?.(prefix.tokens);
      this.#length = end;
      prefix = undefined;
      if (!isLast) continue;
      if (result.kind === "token") {
        const { kind: _, ...token } = result;
        return token;
      }
      throw new UserError(
        "next_nonsense",
        `the chain gives ${result.kind === "hidden" ? "hidden states: it ends before the model's last layer" : result.kind}`,
        "start its last node with --next and the URL of the node that holds the following layers",
      );
    }
  }

  /** At least one token is always run: it gives the next one. */
  #prefixOf(sequence: Int32Array): { tokens: number; digest: string } | undefined {
    if (!this.#usesPrefix) return undefined;
    const { tokens, prefix } = this.#options.runner.longestPrefix(sequence.subarray(0, -1));
    return tokens > 0 && prefix !== undefined ? { tokens, digest: prefix } : undefined;
  }

  #run(ids: Int32Array, positionStart: number, isLast: boolean, prefix: string | undefined): Promise<RowReply> {
    const { runner, signal, deadline } = this.#options;
    return runner.run({
      session: this.#id,
      step: ++this.#step,
      positionStart,
      maxLen: this.#maxLen,
      prefix,
      input: { kind: "ids", ids },
      want: isLast ? "token" : "none",
      sampling: this.#sampling,
      signal,
      deadline,
      requestId: this.#requestId,
    });
  }
}

/** 160 random bits: nobody guesses it. */
const sessionId = (): string => randomBytes(20).toString("base64url");

/** A draw depends on the seed and the position: with one seed a replay makes the same tokens. */
function samplingOf({ sampling = {}, stopTokenIds = [] }: GenerateTokensOptions): Sampling | undefined {
  const stops = [...new Set([...(sampling.stop_token_ids ?? []), ...stopTokenIds])];
  const seed = sampling.seed ?? (isDrawn(sampling) ? randomBytes(4).readUInt32LE() : undefined);
  const whole = {
    ...sampling,
    ...(seed !== undefined && { seed }),
    ...(stops.length > 0 && { stop_token_ids: stops }),
  };
  return Object.keys(whole).length > 0 ? whole : undefined;
}

function isLost(error: unknown): boolean {
  const code = error instanceof UserError ? error.code : error instanceof RemoteError ? error.body.code : undefined;
  return code === "session_lost" || code === "step_conflict";
}
