import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { formatSpan, isTail } from "../base/span.ts";
import { readBody } from "../protocol/body.ts";
import type { ErrorBody } from "../protocol/error-reply.ts";
import { HEADERS, readHeader } from "../protocol/headers.ts";
import type { ForwardRequest, ForwardRow, NodeFacts } from "../protocol/message.ts";
import { parseForward } from "../protocol/parse.ts";
import { encodeReply, hasPlaceForErrors, type HeadText, replyBytes, type RowOutcome } from "../protocol/reply.ts";
import { StreamingDecoder } from "../tokenizer/streaming-decoder.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import { callerOf } from "./callers.ts";
import { type Answerer, describeError, RowErrors } from "./errors.ts";
import type { Lifecycle } from "./lifecycle.ts";
import type { RowCall, RowReply, RowRunner } from "./rows.ts";

export interface Limits {
  /** Bytes of a request body. */
  readonly maxBodyBytes: number;
  /** Bytes of a reply's values. */
  readonly maxOutputBytes: number;
  /** Rows without an open session that may wait for the device. */
  readonly maxWaiting: number;
  /** Rows of one call. */
  readonly maxRows: number;
  /** Sessions that are open at one time. */
  readonly maxSessions: number;
}

export interface ForwardParts {
  readonly runner: RowRunner;
  readonly tokenizer: Tokenizer | undefined;
  readonly facts: NodeFacts;
  readonly numerics: string;
  readonly limits: Limits;
  readonly lifecycle: Lifecycle;
  readonly answerer: Answerer;
  readonly log: Logger;
}

/** What is known of a call beside its request. */
interface Call {
  readonly id: string;
  readonly startedAt: number;
  /** The node that it is from, where it is from one. */
  readonly caller: string | undefined;
  readonly signal: AbortSignal;
}

/**
 * `POST /forward`: read it, run each of its rows through this node's layers and on to the next node where there is one,
 * and answer in the caller's spelling. `named` is told the call's id as soon as it is known.
 */
export async function forward(message: Request, parts: ForwardParts, named: (id: string) => void): Promise<Response> {
  const startedAt = performance.now();
  const given = readHeader(message.headers, HEADERS.requestId)?.text;
  if (given !== undefined) named(given);
  if (isBig(message.headers)) parts.runner.checkRoom(); // before megabytes are read that could not be used
  const body = await readBody(message, bodyLimit(message.headers, parts), "the body");
  return parts.lifecycle.run(async () => {
    const request = parseForward({ headers: message.headers, body }, parts.facts);
    const id = request.requestId ?? crypto.randomUUID();
    named(id);
    using deadline = deadlineOf(request, startedAt, parts);
    const signal = AbortSignal.any([message.signal, deadline.signal]);
    return await answer(request, { id, startedAt, caller: callerOf(message.headers), signal }, parts);
  });
}

/** Steps of sessions that are open are small, and always have room: only what is larger is refused unread. */
const BIG_BODY_BYTES = 1 << 20;

const isBig = (headers: Headers): boolean => Number(headers.get("Content-Length") ?? Infinity) > BIG_BODY_BYTES;

/** JSON is parsed in one go, during which the node answers nobody: a batch that large goes as a container. */
const JSON_BODY_BYTES = 16 << 20;

function bodyLimit(headers: Headers, { limits }: ForwardParts): number {
  const isJson = headers.get("Content-Type")?.trim().toLowerCase().startsWith("application/json");
  return isJson ? Math.min(limits.maxBodyBytes, JSON_BODY_BYTES) : limits.maxBodyBytes;
}

async function answer(request: ForwardRequest, call: Call, parts: ForwardParts): Promise<Response> {
  const { runner, facts, limits } = parts;
  const next = runner.nextOf(request.route);
  checkOutput(request, next !== undefined || isTail(facts.span), facts, limits);

  const { noRoom } = runner; // before the first row of this call takes any
  const rows = rowCalls(request, call).map((row) => (noRoom && runner.isNew(row) ? { ...row, problem: noRoom } : row));
  const settled = await Promise.allSettled(rows.map((row) => runRow(row, runner)));
  const { aborted, reason } = call.signal;
  if (aborted && !(reason instanceof UserError)) throw reason; // nobody is there to be told
  const replies = settled.flatMap((row) => (row.status === "fulfilled" ? [row.value] : []));
  const outcomes = outcomesOf(request, settled, call, parts);

  const reply = encodeReply(request, outcomes, facts, headText(request, outcomes, parts.tokenizer));
  const end = Math.max(...replies.map((row) => row.end));
  return new Response(reply.body, {
    status: reply.status,
    headers: {
      ...reply.headers,
      [HEADERS.layers]: formatSpan({ ...facts.span, end }),
      [HEADERS.cacheLen]: cacheLengths(request, settled, runner).join(","),
      [HEADERS.numerics]: parts.numerics,
      [HEADERS.requestId]: call.id,
      "Server-Timing": timingOf(replies, call),
    },
  });
}

/** What a row asks of the runner, and why it cannot be run. */
type RowToRun = RowCall & Pick<ForwardRow, "problem">;

function rowCalls(request: ForwardRequest, call: Call): RowToRun[] {
  const { payload, rows, tokenIds, route, deadlineMs } = request;
  const deadline = deadlineMs === undefined ? undefined : call.startedAt + deadlineMs;
  let at = 0;
  return rows.map((forwardRow) => {
    const { tokens, index: _, ...row } = forwardRow;
    const [begin, end] = [at, (at += tokens)];
    const input: RowCall["input"] =
      payload.kind === "ids"
        ? { kind: "ids", ids: payload.ids.subarray(begin, end) }
        : { kind: "hidden", hidden: payload.values.subarray(begin * payload.hiddenSize, end * payload.hiddenSize) };
    const ids = tokenIds?.subarray(begin, end);
    const { signal, caller, id: requestId } = call;
    return { ...row, input, tokenIds: ids, route, deadline, signal, requestId, caller, call };
  });
}

async function runRow({ problem, ...row }: RowToRun, runner: RowRunner): Promise<RowReply> {
  if (problem) throw problem;
  return runner.run(row);
}

/**
 * What came of each row. Throws where that is no reply: where no row went well, or where one failed and the spelling has
 * no place to say so beside the others.
 */
function outcomesOf(
  request: ForwardRequest,
  settled: readonly PromiseSettledResult<RowReply>[],
  call: Call,
  parts: ForwardParts,
): RowOutcome[] {
  const good = settled.find((row) => row.status === "fulfilled")?.value.result;
  const isWhole = good === undefined || !hasPlaceForErrors(request, good.kind);
  const failed: { status: number; body: ErrorBody; retryAfter: string | null }[] = [];
  const outcomes = settled.map((row, i): RowOutcome => {
    if (row.status === "fulfilled") return row.value.result;
    const { body, ...rest } = describeError(row.reason, parts.answerer, parts.log, { id: call.id });
    const error = withRow(body, request.rows[i]!, settled.length);
    failed.push({ body: error, ...rest });
    return { kind: "error", error };
  });
  const [first] = failed;
  if (first === undefined || !isWhole) return outcomes;
  const bodies = failed.map(({ body }) => body);
  throw new RowErrors(good === undefined ? bodies : bodies.slice(0, 1), first.status, first.retryAfter);
}

/** A row's number in this call, not in the frame in which it went on. */
function withRow({ row, ...body }: ErrorBody, { index }: ForwardRow, rows: number): ErrorBody {
  return (rows > 1 || row !== undefined ? { ...body, row: index } : body) as ErrorBody;
}

/** One for each row of the call, those included that took no part. */
function cacheLengths(
  { rows, rectangle }: ForwardRequest,
  settled: readonly PromiseSettledResult<RowReply>[],
  runner: RowRunner,
): number[] {
  const lengths = Array.from({ length: rectangle?.lengths.length ?? rows.length }, () => 0);
  rows.forEach(({ index, session }, i) => {
    const row = settled[i]!;
    lengths[index] = row.status === "fulfilled" ? row.value.cacheLen : runner.lengthOf(session);
  });
  return lengths;
}

/** Of the rows that took longest: they run side by side. */
function timingOf(replies: readonly RowReply[], { startedAt }: Call): string {
  const longest = (part: "queue" | "stage" | "next") => Math.max(...replies.map(({ timing }) => timing[part] ?? -1));
  const next = longest("next");
  const parts = { queue: longest("queue"), stage: longest("stage"), ...(next >= 0 && { next }) };
  return Object.entries({ ...parts, total: performance.now() - startedAt })
    .map(([name, ms]) => `${name};dur=${ms.toFixed(1)}`)
    .join(", ");
}

/** Values that would not fit into a reply are refused before they are computed. */
function checkOutput(
  request: ForwardRequest,
  reachesTail: boolean,
  facts: NodeFacts,
  { maxOutputBytes }: Limits,
): void {
  const kind = reachesTail ? request.want : "hidden";
  const bytes = replyBytes(request, kind, facts);
  if (bytes <= maxOutputBytes) return;
  throw new UserError(
    "too_large",
    `the reply (${kind}) would have ${formatBytes(bytes)}, and this node's limit is ${formatBytes(maxOutputBytes)}`,
    "send fewer or shorter rows, or ask for less (X-Meshnet-Want)",
  );
}

/** Only a head can say what a token reads like: after the tokens of this call, in a session perhaps the last alone. */
function headText(
  request: ForwardRequest,
  outcomes: readonly RowOutcome[],
  tokenizer: Tokenizer | undefined,
): HeadText | undefined {
  const { payload, rows } = request;
  if (!tokenizer || payload.kind !== "ids") return undefined;
  let at = 0;
  const prompts = rows.map(({ tokens }) => Array.from(payload.ids.subarray(at, (at += tokens))));
  const text = prompts.map((prompt, row) => {
    const outcome = outcomes[row]!;
    if (outcome.kind !== "token") return null;
    if (outcome.finish === "stop") return "";
    const decoder = new StreamingDecoder(tokenizer);
    for (const id of prompt) decoder.push(id);
    return decoder.push(outcome.id);
  });
  return { text, promptTokenIds: payload.fromText ? prompts : undefined };
}

/** Aborts when the caller's patience is at its end. */
function deadlineOf({ deadlineMs }: ForwardRequest, startedAt: number, { facts }: ForwardParts) {
  const controller = new AbortController();
  const error = () =>
    new UserError(
      "deadline",
      `the call's ${deadlineMs} ms are over, and layers ${formatSpan(facts.span)} have no result yet`,
      "give more time (X-Meshnet-Deadline-Ms), or send fewer tokens",
    );
  const left = deadlineMs === undefined ? undefined : deadlineMs - (performance.now() - startedAt);
  const timer =
    left === undefined
      ? undefined
      : setTimeout(() => controller.abort(error()), Math.max(0, Math.min(left, MAX_TIMER_MS)));
  return { signal: controller.signal, [Symbol.dispose]: () => clearTimeout(timer) };
}

/** Timers wrap round beyond 2^31 - 1. */
const MAX_TIMER_MS = 2 ** 31 - 1;
