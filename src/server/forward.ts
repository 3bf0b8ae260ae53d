import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan, isTail } from "../base/span.ts";
import type { Stage, StageInput, StageOutput } from "../engine/types.ts";
import type { Admission } from "../mesh/admission.ts";
import { readBody } from "../protocol/body.ts";
import { RemoteError } from "../protocol/error-reply.ts";
import { HEADERS, readHeader } from "../protocol/headers.ts";
import type { ForwardRequest, NodeFacts } from "../protocol/message.ts";
import { parseForward } from "../protocol/parse.ts";
import { encodeReply, type ForwardResult, type HeadText, replyBytes } from "../protocol/reply.ts";
import { StreamingDecoder } from "../tokenizer/streaming-decoder.ts";
import type { Tokenizer } from "../tokenizer/tokenizer.ts";
import type { Readiness } from "./health.ts";
import type { Lifecycle } from "./lifecycle.ts";
import type { Queue } from "./queue.ts";

export interface Limits {
  /** Bytes of a request body. */
  readonly maxBodyBytes: number;
  /** Bytes of a reply's values. */
  readonly maxOutputBytes: number;
  /** Calls that may wait for the device. */
  readonly maxWaiting: number;
  /** Rows of one call. */
  readonly maxRows: number;
}

export interface ForwardParts {
  readonly stage: Stage;
  readonly tokenizer: Tokenizer | undefined;
  readonly facts: NodeFacts;
  readonly numerics: string;
  readonly next: Admission | undefined;
  readonly limits: Limits;
  readonly queue: Queue;
  readonly lifecycle: Lifecycle;
  readonly readiness: Readiness;
}

/** What is known of a call beside its request. */
interface Call {
  readonly id: string;
  readonly startedAt: number;
  readonly signal: AbortSignal;
}

/**
 * `POST /forward`: read it, run this node's layers, send the result on where there is a next node, and answer in the
 * caller's spelling. `named` is told the call's id as soon as it is known.
 */
export async function forward(message: Request, parts: ForwardParts, named: (id: string) => void): Promise<Response> {
  const startedAt = performance.now();
  const given = readHeader(message.headers, HEADERS.requestId)?.text;
  if (given !== undefined) named(given);
  parts.queue.checkRoom(); // before megabytes are read that could not be used
  const body = await readBody(message, bodyLimit(message.headers, parts), "the body");
  return parts.lifecycle.run(async () => {
    const request = parseForward({ headers: message.headers, body }, parts.facts);
    const id = request.requestId ?? crypto.randomUUID();
    named(id);
    using deadline = deadlineOf(request, startedAt, parts);
    return await answer(request, { id, startedAt, signal: AbortSignal.any([message.signal, deadline.signal]) }, parts);
  });
}

/** JSON is parsed in one go, during which the node answers nobody: a batch that large goes as a container. */
const JSON_BODY_BYTES = 16 << 20;

function bodyLimit(headers: Headers, { limits }: ForwardParts): number {
  const isJson = headers.get("Content-Type")?.trim().toLowerCase().startsWith("application/json");
  return isJson ? Math.min(limits.maxBodyBytes, JSON_BODY_BYTES) : limits.maxBodyBytes;
}

async function answer(request: ForwardRequest, call: Call, parts: ForwardParts): Promise<Response> {
  const { stage, facts, limits } = parts;
  const next = nextOf(request, parts);
  checkOutput(request, next !== undefined || isTail(facts.span), facts, limits);

  const queuedAt = performance.now();
  let stageAt = queuedAt;
  const work = () => {
    stageAt = performance.now();
    return stage.forward(stageInput(request), request.want, call.signal);
  };
  const output = await parts.queue.run(work, call.signal);
  parts.readiness.wentWell();
  const sentAt = performance.now();

  const passed = next && output.kind === "hidden" ? await passOn(request, output.values, call, next) : undefined;
  const result = passed?.result ?? resultOf(output, stage);
  const doneAt = performance.now();

  const reply = encodeReply(request, result, facts, headText(request, result, parts.tokenizer));
  const cached = request.rectangle?.lengths ?? request.rows;
  const timing = { queue: stageAt - queuedAt, stage: sentAt - stageAt, ...(passed && { next: doneAt - sentAt }) };
  return new Response(reply.body, {
    status: reply.status,
    headers: {
      ...reply.headers,
      [HEADERS.layers]: formatSpan({ ...facts.span, end: passed?.end ?? facts.span.end }),
      [HEADERS.cacheLen]: cached.map(() => 0).join(","), // a stateless call leaves nothing behind
      [HEADERS.numerics]: parts.numerics,
      [HEADERS.requestId]: call.id,
      "Server-Timing": Object.entries({ ...timing, total: doneAt - call.startedAt })
        .map(([name, ms]) => `${name};dur=${ms.toFixed(1)}`)
        .join(", "),
    },
  });
}

/** The next node where this call is to be passed on to it. Throws where that cannot be. */
function nextOf({ route }: ForwardRequest, { next }: ForwardParts): Admission | undefined {
  if (route === "local" || route?.length === 0) return undefined;
  const hop = route?.[0];
  if (hop !== undefined && (next === undefined || URL.parse(hop)?.href.replace(/\/*$/, "/") !== next.next.url)) {
    throw new UserError(
      "not_supported",
      `the route goes on to ${hop}, and this node passes on to ${next?.next.url ?? "no other node"}`,
      "a node calls only the node it was started with (--next)",
    );
  }
  if (next?.refusal) throw next.refusal;
  return next;
}

async function passOn(request: ForwardRequest, values: Uint16Array, call: Call, admission: Admission) {
  const { rows, want, route, deadlineMs } = request;
  try {
    const reply = await admission.next.forward({
      rows,
      values,
      want,
      requestId: call.id,
      route: Array.isArray(route) ? route.slice(1) : undefined,
      deadlineMs: deadlineMs === undefined ? undefined : deadlineMs - (performance.now() - call.startedAt),
      signal: call.signal,
    });
    admission.seen(reply.node);
    return reply;
  } catch (error) {
    if (error instanceof UserError || error instanceof RemoteError) admission.recheck();
    throw error;
  }
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

function stageInput({ payload, rows }: ForwardRequest): StageInput {
  return payload.kind === "ids"
    ? { kind: "ids", rows, ids: payload.ids }
    : { kind: "hidden", rows, hidden: payload.values };
}

function resultOf(output: StageOutput, { info }: Stage): ForwardResult {
  if (output.kind !== "token") return output;
  return { ...output, finish: output.ids.map((id) => (info.eosTokenIds.includes(id) ? "stop" : null)) };
}

/** Only a head can say what a token reads like. */
function headText(
  request: ForwardRequest,
  result: ForwardResult,
  tokenizer: Tokenizer | undefined,
): HeadText | undefined {
  const { payload, rows } = request;
  if (!tokenizer || payload.kind !== "ids" || result.kind !== "token") return undefined;
  let at = 0;
  const prompts = rows.map(({ tokens }) => Array.from(payload.ids.subarray(at, (at += tokens))));
  const text = prompts.map((prompt, row) => {
    const decoder = new StreamingDecoder(tokenizer);
    for (const id of prompt) decoder.push(id);
    return result.finish[row] === "stop" ? "" : decoder.push(result.ids[row]!);
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
