import { type Context, Hono } from "hono";
import { UserError } from "../../base/errors.ts";
import type { Logger } from "../../base/log.ts";
import { quote } from "../../base/quote.ts";
import { formatSpan, isTail } from "../../base/span.ts";
import type { Admission } from "../../mesh/admission.ts";
import { type GenerationDefaults, generationDefaults } from "../../models/generation-config.ts";
import { readBody } from "../../protocol/body.ts";
import { HEADERS, readHeader } from "../../protocol/headers.ts";
import { noChatTemplate } from "../../tokenizer/chat-template.ts";
import type { Tokenizer } from "../../tokenizer/tokenizer.ts";
import { type Answerer, describeError } from "../errors.ts";
import type { Lifecycle } from "../lifecycle.ts";
import type { RowRunner } from "../rows.ts";
import { readChatRequest } from "./chat-request.ts";
import { readCompletionRequest } from "./completion-request.ts";
import { OPENAI_REQUEST_ID, toldByOpenAi, toOpenAi } from "./errors.ts";
import { eventStream } from "./event-stream.ts";
import type { Fields } from "./fields.ts";
import { replyEvents, wholeReply } from "./reply.ts";
import { chatShape, completionShape, type Shape } from "./reply-shapes.ts";
import { readJsonObject, type TextFacts, type TextRequest } from "./text-request.ts";
import type { TextModel } from "./text-model.ts";
import { makeTexts } from "./texts.ts";
import { WaitingRoom } from "./waiting-room.ts";

/** Reads the parameters of a call, and decides how its reply is written. */
type Reader = (fields: Fields, signal: AbortSignal) => Promise<{ request: TextRequest; shape: Shape }>;

export interface FrontDoorParts {
  readonly runner: RowRunner;
  readonly next: Admission | undefined;
  readonly tokenizer: Tokenizer;
  readonly model: Partial<TextModel>;
  readonly modelId: string;
  readonly numerics: string;
  readonly lifecycle: Lifecycle;
  readonly answerer: Answerer;
  readonly log: Logger;
  /** Texts that may wait for room. */
  readonly maxWaiting: number;
  readonly timing?: Partial<typeof TIMING>;
}

/** Proxies give up after 30 or 60 s of silence. */
const TIMING = { heartbeatMs: 10_000, stallMs: 60_000 };

/** JSON is parsed in one go, during which the node answers nobody. */
const BODY_BYTES = 16 << 20;

/**
 * The OpenAI-compatible API of a head: `POST /v1/completions`, `POST /v1/chat/completions`, `GET /v1/models`. What is thrown here is
 * written by `openAiErrorReply`.
 */
export class FrontDoor {
  readonly #parts: FrontDoorParts;
  readonly #defaults: GenerationDefaults;
  readonly #room: WaitingRoom;
  readonly #startedAt = Math.floor(Date.now() / 1000);

  constructor(parts: FrontDoorParts) {
    this.#parts = parts;
    this.#defaults = parts.model.defaults ?? generationDefaults(undefined, {});
    this.#room = new WaitingRoom(parts.maxWaiting);
  }

  /** The context is that of the whole chain, which may change with its nodes. */
  get #facts(): TextFacts {
    const { maxContext, stage } = this.#parts.runner;
    return { maxContext, vocabSize: stage.info.vocabSize, defaults: this.#defaults };
  }

  /** To be added to `hono`. `named` is told the id of a call. */
  mount(hono: Hono<{ Variables: { id: string } }>): void {
    hono.post("/v1/completions", (c) =>
      this.#named(c, async (fields, signal) => {
        const { tokenizer } = this.#parts;
        const request = await readCompletionRequest(fields, tokenizer, { ...this.#facts, signal });
        return { request, shape: completionShape(request, tokenizer) };
      }),
    );
    hono.post("/v1/chat/completions", (c) =>
      this.#named(c, async (fields) => {
        const { model, modelId, tokenizer } = this.#parts;
        if (!model.chatTemplate) throw noChatTemplate(modelId);
        const request = readChatRequest(fields, model.chatTemplate, this.#facts);
        return { request, shape: chatShape(request, tokenizer) };
      }),
    );
    hono.get("/v1/models", (c) => c.json({ object: "list", data: [this.#model()] }));
    hono.get("/v1/models/:id{.+}", (c) => {
      this.#checkModel(c.req.param("id"));
      return c.json(this.#model());
    });
  }

  async #named(c: Context<{ Variables: { id: string } }>, read: Reader): Promise<Response> {
    const id = requestIdOf(c.req.raw.headers);
    c.set("id", id);
    const reply = await this.#answer(c.req.raw, id, read);
    reply.headers.set(HEADERS.requestId, id);
    reply.headers.set(OPENAI_REQUEST_ID, id);
    return reply;
  }

  async #answer(message: Request, requestId: string, read: Reader): Promise<Response> {
    const { lifecycle, ...parts } = this.#parts;
    lifecycle.check();
    this.#checkChain();
    const body = await readBody(message, BODY_BYTES, "the body");
    lifecycle.check(); // the body may have taken its time

    const running = Promise.withResolvers<void>();
    void lifecycle.run(() => running.promise);
    const caller = new AbortController();
    const hangUp = () => caller.abort(message.signal.reason);
    if (message.signal.aborted) hangUp();
    message.signal.addEventListener("abort", hangUp, { once: true });
    // Whatever of the call is still going on has nobody to do it for.
    const end = () => {
      message.signal.removeEventListener("abort", hangUp);
      caller.abort(new Error("the call is over"));
      running.resolve();
    };
    let isStreaming = false;
    try {
      const fields = readJsonObject(body);
      this.#checkModel(fields.get("model"));
      const { request, shape } = await read(fields, caller.signal);
      const texts = makeTexts(request, { ...this.#parts, room: this.#room }, { signal: caller.signal, requestId });
      const heading = {
        id: `${shape.prefix}-${requestId}`,
        created: Math.floor(Date.now() / 1000),
        model: parts.modelId,
        system_fingerprint: parts.numerics,
      };
      if (!request.stream) return Response.json(await wholeReply(texts, shape, heading));
      isStreaming = true;
      const events = replyEvents(texts, request, shape, heading);
      return await this.#stream(events, { signal: caller.signal, requestId, onEnd: end });
    } finally {
      if (!isStreaming) end();
    }
  }

  #stream(
    events: AsyncGenerator<string>,
    { signal, requestId, onEnd }: { signal: AbortSignal; requestId: string; onEnd: () => void },
  ): Promise<Response> {
    const { answerer, log, timing } = this.#parts;
    const describe = (error: unknown) =>
      JSON.stringify({
        error: toOpenAi(describeError(error, answerer, log, { id: requestId, told: toldByOpenAi })).error,
      });
    return eventStream(events, { ...TIMING, ...timing, describe, signal, onEnd });
  }

  /** Throws UserError `not_ready`, or why the stage takes nothing. */
  #checkChain(): void {
    const { next, runner } = this.#parts;
    const { info, outage } = runner.stage;
    if (outage) throw outage;
    if (next === undefined && !isTail(info.span)) {
      throw new UserError(
        "not_ready",
        `this node holds layers ${formatSpan(info.span)} of ${info.span.total}, and has no next node that goes on`,
        "start it with --next and the URL of the node that holds the following layers",
      );
    }
    const problem = next?.notReady;
    if (problem !== undefined) throw new UserError("not_ready", problem, "wait for the next node, or look at its log");
  }

  /** Throws UserError `not_found` unless it is this node's model, by its id or the last part of that. Absent: it is. */
  #checkModel(model: unknown): void {
    const { modelId } = this.#parts;
    if (model === undefined || model === modelId || model === shortName(modelId)) return;
    throw new UserError(
      "not_found",
      `the model ${quote(model)} is not here`,
      `this node has ${modelId}; leave model away to take what there is`,
      { details: { param: "model" } },
    );
  }

  #model() {
    return { id: this.#parts.modelId, object: "model", created: this.#startedAt, owned_by: "meshnet" };
  }
}

/** `gpt2` of `openai-community/gpt2`, or of a directory's path. */
const shortName = (modelId: string): string =>
  modelId
    .replace(/[\\/]+$/, "")
    .split(/[\\/]/)
    .at(-1)!;

/** The caller's own name for the call, where it has one that logs and headers can bear. */
function requestIdOf(headers: Headers): string {
  const given = readHeader(headers, HEADERS.requestId)?.text || headers.get(OPENAI_REQUEST_ID);
  return given && /^[\w.:-]{1,128}$/.test(given) ? given : crypto.randomUUID();
}
