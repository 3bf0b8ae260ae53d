import { sum } from "../../base/bytes.ts";
import { randomSeed } from "../../engine/random.ts";
import { type Choice, makeText, type Piece, type TextMaker, type Usage } from "./text-maker.ts";
import type { TextRequest } from "./text-request.ts";

/** The texts of one call, while they are made. */
export interface Texts {
  /** Pieces of all of them, as they come. Leaving it early ends all that runs. */
  readonly pieces: AsyncGenerator<Piece>;
  readonly usage: Usage;
}

/** So many texts of one call are made side by side. */
const MOST_AT_ONCE = 16;

/** Makes all texts of a call: for each prompt so many, prompt after prompt. */
export function makeTexts(
  request: TextRequest,
  maker: TextMaker,
  { signal, requestId }: { signal: AbortSignal; requestId: string },
): Texts {
  const prompt = sum(request.prompts.map(({ ids }) => ids.length));
  const usage = { prompt, completion: 0, cached: 0 };
  const control = new AbortController();
  const abort = () => control.abort(signal.reason);
  if (signal.aborted) abort();
  signal.addEventListener("abort", abort, { once: true });
  const common = {
    seed: request.seed ?? randomSeed(),
    signal: control.signal,
    requestId,
    usage,
  };
  const sources = choicesOf(request).map((choice) => () => makeText(request, { ...common, ...choice }, maker));
  return { pieces: merged(sources, control), usage };
}

function choicesOf({
  prompts,
  choices,
}: TextRequest): Pick<Choice, "index" | "number" | "prompt" | "after" | "onBegun">[] {
  return prompts.flatMap((prompt, i) => {
    const first = Promise.withResolvers<void>();
    return Array.from({ length: choices }, (_, number) => {
      const index = i * choices + number;
      return number === 0
        ? { index, number, prompt, onBegun: first.resolve }
        : { index, number, prompt, after: first.promise };
    });
  });
}

/** What several sources give, whichever is first; so many of them at a time, and none further ahead than one piece. */
async function* merged<T>(sources: readonly (() => AsyncGenerator<T>)[], control: AbortController): AsyncGenerator<T> {
  const waiting = [...sources];
  const running = new Map<AsyncGenerator<T>, Promise<{ source: AsyncGenerator<T>; result: IteratorResult<T> }>>();
  const ask = (source: AsyncGenerator<T>) => {
    running.delete(source); // to the end of the line
    running.set(
      source,
      source.next().then((result) => ({ source, result })),
    );
  };
  try {
    for (;;) {
      while (running.size < MOST_AT_ONCE && waiting.length > 0) ask(waiting.shift()!());
      if (running.size === 0) return;
      const { source, result } = await Promise.race(running.values());
      if (result.done) {
        running.delete(source);
        continue;
      }
      yield result.value;
      ask(source);
    }
  } finally {
    control.abort(new Error("the call has ended"));
    await Promise.allSettled([...running.keys()].map((source) => source.return(undefined)));
  }
}
