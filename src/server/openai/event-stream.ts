export interface EventStreamOptions {
  /** How an error reads that comes when the stream has begun. */
  readonly describe: (error: unknown) => string;
  /** Aborted when the reader is gone. */
  readonly signal: AbortSignal;
  /** So long nothing may come before a comment says that the call is alive: proxies close connections that are silent. */
  readonly heartbeatMs: number;
  /** A reader that takes nothing for so long is gone. */
  readonly stallMs: number;
  /** The stream is over, in whatever way. */
  readonly onEnd: () => void;
}

/**
 * Server-sent events: `data` of each comes from `events`, and nothing is made before the reader takes it. A reader that goes away ends
 * `events`.
 *
 * Resolves with the first event or the first heartbeat: an error that comes before is thrown, so that it can be a reply with a status of its
 * own. One that comes later is the last event.
 */
export async function eventStream(events: AsyncGenerator<string>, options: EventStreamOptions): Promise<Response> {
  const source = new EventSource(events, options);
  // By itself a stream does not learn of a reader that is gone before it begins.
  options.signal.addEventListener("abort", () => source.end(), { once: true });
  let first: string | undefined;
  try {
    first = await source.next();
  } catch (error) {
    source.end();
    throw error;
  }
  const text = new TextEncoder();
  let waiting: string | undefined = first;
  const body = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const chunk = waiting ?? (await source.nextOrError());
        waiting = undefined;
        if (chunk === undefined) return controller.close();
        controller.enqueue(text.encode(chunk));
        source.expectPull(() => controller.error(new Error("the reader takes nothing")));
      },
      cancel: () => source.end(),
    },
    { highWaterMark: 0 },
  );
  return new Response(body, { headers: HEADERS });
}

const HEADERS = {
  "Content-Type": "text/event-stream; charset=utf-8",
  "Cache-Control": "no-cache",
  "X-Accel-Buffering": "no", // nginx would collect what it passes on
};

const HEARTBEAT = ": still working\n\n";
const DONE = "data: [DONE]\n\n";

/** The text of the stream, part by part. */
class EventSource {
  readonly #events: AsyncGenerator<string>;
  readonly #options: EventStreamOptions;
  #pending: Promise<IteratorResult<string>> | undefined;
  #isOver = false;
  #isEnded = false;
  #stall: ReturnType<typeof setTimeout> | undefined;

  constructor(events: AsyncGenerator<string>, options: EventStreamOptions) {
    this.#events = events;
    this.#options = options;
    if (options.signal.aborted) this.end();
  }

  /** The next event or heartbeat; `[DONE]` after the last event, and undefined after that. Throws what `events` does. */
  async next(): Promise<string | undefined> {
    clearTimeout(this.#stall);
    if (this.#isOver) {
      this.end();
      return undefined;
    }
    this.#pending ??= this.#events.next();
    const result = await within(this.#options.heartbeatMs, this.#pending);
    if (result === undefined) return HEARTBEAT;
    this.#pending = undefined;
    if (!result.done) return `data: ${result.value}\n\n`;
    this.#isOver = true;
    return DONE;
  }

  /** As `next`, but an error is an event, and the last one. */
  async nextOrError(): Promise<string | undefined> {
    try {
      return await this.next();
    } catch (error) {
      this.#isOver = true;
      return this.#isEnded ? undefined : `data: ${this.#options.describe(error)}\n\n`;
    }
  }

  /** Gives up where the next part is not asked for in time. */
  expectPull(giveUp: () => void): void {
    if (this.#isEnded) return;
    this.#stall = setTimeout(() => {
      giveUp();
      this.end();
    }, this.#options.stallMs);
  }

  end(): void {
    clearTimeout(this.#stall);
    if (this.#isEnded) return;
    this.#isEnded = true;
    this.#isOver = true;
    void this.#events.return(undefined).catch(() => {}); // it has been told already, or nobody is there
    this.#options.onEnd();
  }
}

/** Undefined where it takes longer. */
async function within<T>(ms: number, work: Promise<T>): Promise<T | undefined> {
  const late = Promise.withResolvers<undefined>();
  const timer = setTimeout(late.resolve, ms);
  try {
    return await Promise.race([work, late.promise]);
  } finally {
    clearTimeout(timer);
  }
}
