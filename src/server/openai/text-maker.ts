import { seedOfChoice } from "../../engine/random.ts";
import type { Sampling } from "../../protocol/sampling.ts";
import { StopMatcher } from "../../tokenizer/stop-strings.ts";
import { StreamingDecoder } from "../../tokenizer/streaming-decoder.ts";
import type { Tokenizer } from "../../tokenizer/tokenizer.ts";
import { generateTokens, type MadeToken } from "../generation.ts";
import type { RowRunner } from "../rows.ts";
import { promptLogprobs } from "./prompt-logprobs.ts";
import type { Prompt, TextRequest } from "./text-request.ts";
import { lengthOf, type TokenReport } from "./token-report.ts";
import type { WaitingRoom } from "./waiting-room.ts";

/** What there is to make texts with. */
export interface TextMaker {
  readonly runner: RowRunner;
  readonly tokenizer: Tokenizer;
  readonly room: WaitingRoom;
}

/** One text of a call. */
export interface Choice {
  /** Among all of the call. */
  readonly index: number;
  readonly prompt: Prompt;
  /** Among those of this prompt. */
  readonly number: number;
  /** Of the call, or made for it. */
  readonly seed: number;
  /** Awaited before it begins: the first text of a prompt reads it in, the others begin with what that leaves. */
  readonly after?: Promise<void>;
  /** The prompt is read in. */
  readonly onBegun?: () => void;
  readonly signal: AbortSignal;
  readonly requestId: string;
  readonly usage: Usage;
}

/** A further piece of a text, with the tokens that are complete with it. */
export interface Piece {
  readonly index: number;
  readonly text: string;
  /** Empty unless logprobs were asked for. */
  readonly reports: readonly TokenReport[];
  /** Of the last piece: the text is at its end, by itself or by a stop string; or there is no room for more. */
  readonly finish: "stop" | "length" | null;
}

/** Tokens, as they are counted up. */
export interface Usage {
  prompt: number;
  completion: number;
  /** Of the prompts: what was there already. */
  cached: number;
}

/** The text of a choice, piece by piece. Its session ends with it in any case. */
export async function* makeText(request: TextRequest, choice: Choice, maker: TextMaker): AsyncGenerator<Piece> {
  const { index } = choice;
  try {
    await choice.after;
    const { offset, piece: echo } = await echoOf(request, choice, maker);
    if (request.maxTokens === 0) {
      if (echo) yield echo;
      yield { index, text: "", reports: [], finish: "length" };
      return;
    }
    const text = new OpenText(request, choice.prompt, maker.tokenizer, offset);
    let before = echo; // not before the chain has let the text in: till then a failure is a reply of its own
    for await (const token of tokensOf(request, choice, maker)) {
      if (before) yield before;
      before = undefined;
      choice.usage.completion++;
      const made = text.push(token);
      if (made.text !== "" || made.finish !== null) yield { index, ...made };
      if (made.finish !== null) return;
    }
  } finally {
    choice.onBegun?.(); // or it never will be: those that wait for it find out for themselves
  }
}

/** The tokens, as soon as the chain has room for them. */
async function* tokensOf(request: TextRequest, choice: Choice, maker: TextMaker): AsyncGenerator<MadeToken> {
  const { runner, room } = maker;
  const { signal, requestId, usage, seed, number } = choice;
  const sampling: Sampling = { ...request.sampling, seed: seedOfChoice(seed, number) };
  const begin = async () => {
    const tokens = generateTokens({
      ids: choice.prompt.ids,
      maxNewTokens: request.maxTokens,
      sampling,
      signal,
      runner,
      requestId,
      onPrefix: (length) => (usage.cached += number === 0 ? length : 0),
    });
    return { tokens, first: await tokens.next() };
  };
  const { tokens, first } = await room.enter(begin, signal);
  try {
    choice.onBegun?.();
    for (let token = first; !token.done; token = await tokens.next()) yield token.value;
  } finally {
    await tokens.return(undefined);
    room.leave();
  }
}

async function echoOf({ echo, sampling }: TextRequest, choice: Choice, { runner, tokenizer, room }: TextMaker) {
  if (!echo) return { offset: 0 };
  const { index, prompt, signal, requestId } = choice;
  const { ids, text } = prompt;
  const top = sampling.logprobs;
  if (top === undefined) return { offset: lengthOf(text), piece: { index, text, reports: [], finish: null } };
  const all = await room.enter(() => promptLogprobs({ ids, top, runner, signal, requestId }), signal);
  room.leave();
  const offsets = tokenOffsets(ids, tokenizer);
  const reports = all.map((logprobs, i): TokenReport => ({ id: ids[i]!, logprobs, offset: offsets[i]! }));
  return { offset: lengthOf(text), piece: { index, text, reports, finish: null } };
}

/** Where each token's text begins, in code points. */
function tokenOffsets(ids: Int32Array, tokenizer: Tokenizer): number[] {
  const decoder = new StreamingDecoder(tokenizer, { skipSpecialTokens: false });
  let offset = 0;
  return Array.from(ids, (id) => {
    const at = offset;
    offset += lengthOf(decoder.push(id));
    return at;
  });
}

/** So many tokens of a prompt decide how the next one reads. */
const PRIMER_TOKENS = 8;

/** A text that is being made: what of it can be given out, and which tokens have been with it. */
class OpenText {
  readonly #decoder: StreamingDecoder;
  readonly #stops: StopMatcher;
  readonly #wantsReports: boolean;
  /** Tokens whose text is not given out yet. `at`: where it begins, in UTF-16 units of the new text. */
  #held: { readonly at: number; readonly report: TokenReport }[] = [];
  #decoded = 0;
  #given = 0;
  /** Code points. */
  #offset: number;

  constructor(request: TextRequest, prompt: Prompt, tokenizer: Tokenizer, offset: number) {
    this.#decoder = new StreamingDecoder(tokenizer);
    if (request.continues) for (const id of prompt.ids.subarray(-PRIMER_TOKENS)) this.#decoder.push(id);
    this.#stops = new StopMatcher(request.stops);
    this.#wantsReports = request.sampling.logprobs !== undefined;
    this.#offset = offset;
  }

  push({ id, finish, logprobs }: MadeToken): Omit<Piece, "index"> {
    if (finish === "stop") return this.#give(this.#end(), "stop"); // the token ends the text and is no part of it
    if (this.#wantsReports) {
      const report = { id, logprobs: logprobs ?? null, offset: this.#offset };
      this.#held.push({ at: this.#decoded, report });
    }
    const text = this.#give(this.#decode(this.#decoder.push(id)), null);
    if (this.#stops.stopped !== undefined || finish === null) return text;
    const rest = this.#give(this.#end(), "length");
    return { ...rest, text: text.text + rest.text, reports: [...text.reports, ...rest.reports] };
  }

  #end(): string {
    return this.#decode(this.#decoder.end()) + this.#stops.end();
  }

  #decode(text: string): string {
    this.#decoded += text.length;
    this.#offset += lengthOf(text);
    return this.#stops.push(text);
  }

  #give(text: string, finish: "stop" | "length" | null): Omit<Piece, "index"> {
    this.#given += text.length;
    const isStopped = this.#stops.stopped !== undefined;
    // A stop string takes the tokens with it that begin where the text is cut, or later.
    const isOut = ({ at }: { at: number }) => at < this.#given || (finish !== null && !isStopped);
    const reports = this.#held.filter(isOut).map(({ report }) => report);
    this.#held = this.#held.filter((token) => !isOut(token));
    return { text, reports, finish: isStopped ? "stop" : finish };
  }
}
