import { afterEach, describe, expect, test } from "bun:test";
import type { UserError } from "../../src/base/errors.ts";
import { HeadClient, type TextEvent } from "../../src/mesh/head-client.ts";
import { sseData } from "../../src/mesh/sse.ts";

let server: Bun.Server<undefined> | undefined;
afterEach(() => server?.stop(true));

/** A client of something that answers everything in one way. */
function clientOf(answer: (request: Request) => Response | Promise<Response>, silenceMs?: number): HeadClient {
  server = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: answer });
  return new HeadClient(server.url.href, { silenceMs });
}

const EVENTS = { "content-type": "text/event-stream" };
const piece = (text: string, finish_reason: string | null = null) =>
  `data: ${JSON.stringify({ choices: [{ index: 0, text, finish_reason }] })}\n\n`;

const signal = new AbortController().signal;
const textOf = (client: HeadClient): Promise<TextEvent[]> =>
  Array.fromAsync(client.text({ prompt: "x" }, { max_tokens: 3 }, signal));
const failureOf = async (client: HeadClient): Promise<UserError> =>
  textOf(client).then(
    () => expect.unreachable("it went well"),
    (error) => error as UserError,
  );

async function* bytesOf(...chunks: Uint8Array[]) {
  yield* chunks;
}

describe("server-sent events", () => {
  const stream = new TextEncoder().encode(": hello\n\ndata: 你好 🙂\r\n\r\ndata:a\ndata: b\nid: 7\n\n\ndata: cut off");
  test("are the same wherever the stream is cut, also within a character", async () => {
    for (let at = 0; at <= stream.length; at++) {
      const events = await Array.fromAsync(sseData(bytesOf(stream.slice(0, at), stream.slice(at))));
      expect({ at, events }).toEqual({ at, events: ["你好 🙂", "a\nb"] });
    }
  });
});

describe("a text that a head streams", () => {
  test("is asked for as OpenAI's API has it, and comes with its usage", async () => {
    let asked: unknown;
    const usage = { prompt_tokens: 5, completion_tokens: 2, prompt_tokens_details: { cached_tokens: 4 } };
    const end = `data: ${JSON.stringify({ choices: [], usage })}\n\ndata: [DONE]\n\n`;
    const client = clientOf(async (request) => {
      asked = [new URL(request.url).pathname, await request.json()];
      return new Response(piece("a") + piece("b", "stop") + end, { headers: EVENTS });
    });
    expect(await textOf(client)).toEqual([
      { text: "a", finish: null },
      { text: "b", finish: "stop" },
      { text: "", finish: null, usage: { prompt: 5, completion: 2, cached: 4 } },
    ]);
    const options = { max_tokens: 3, stream: true, stream_options: { include_usage: true } };
    expect(asked).toEqual(["/v1/completions", { prompt: "x", ...options }]);
  });

  test("that ends without [DONE] has broken off", async () => {
    const client = clientOf(() => new Response(piece("a"), { headers: EVENTS }));
    expect(await failureOf(client)).toMatchObject({
      code: "next_unreachable",
      message: expect.stringMatching(/broke off in the middle/),
    });
  });

  test("that ends with an error throws it, in this program's words", async () => {
    const error = { message: "the device is lost; wait", type: "server_error", param: null, code: "device_lost" };
    const client = clientOf(
      () => new Response(`${piece("a")}data: ${JSON.stringify({ error })}\n\n`, { headers: EVENTS }),
    );
    expect(await failureOf(client)).toMatchObject({
      code: "device_lost",
      message: "the head answers: the device is lost",
      hint: "wait",
    });
  });

  test("is given up when nothing comes for too long, and not while comments do", async () => {
    const beats = (gap: number) => async () =>
      new Response(
        (async function* () {
          for (let i = 0; i < 5; i++) {
            yield ": still working\n\n";
            await Bun.sleep(gap);
          }
          yield `${piece("late", "stop")}data: [DONE]\n\n`;
        })() as unknown as ReadableStream,
        { headers: EVENTS },
      );
    expect(await textOf(clientOf(beats(60), 200))).toMatchObject([{ text: "late" }]);
    await server!.stop(true);
    expect(await failureOf(clientOf(beats(500), 200))).toMatchObject({
      code: "next_unreachable",
      message: expect.stringMatching(/has said nothing for 0.2 s/),
    });
  });

  test("ends with the caller's signal, and the head learns of it", async () => {
    const gone = Promise.withResolvers<void>();
    const client = clientOf((request) => {
      request.signal.addEventListener("abort", () => gone.resolve());
      const body = new ReadableStream({ start: (control) => control.enqueue(piece("a")) });
      return new Response(body, { headers: EVENTS });
    });
    const control = new AbortController();
    const reason = new Error("Ctrl-C");
    const reading = (async () => {
      for await (const _ of client.text({ prompt: "x" }, {}, control.signal)) control.abort(reason);
    })();
    expect(await reading.catch((error: unknown) => error)).toBe(reason);
    await gone.promise;
  });
});

describe("what a head is", () => {
  const infoOf = (client: HeadClient) => client.info(signal).catch((error: unknown) => error);

  test("is unknown where there is no /info, and an error where that is no node's or never comes", async () => {
    expect(await infoOf(clientOf(() => new Response("", { status: 404 })))).toBeUndefined();
    await server!.stop(true);
    expect(await infoOf(clientOf(() => new Response("<html>")))).toMatchObject({ code: "next_nonsense" });
    await server!.stop(true);
    expect(await infoOf(clientOf(() => new Promise(() => {}), 100))).toMatchObject({
      code: "next_unreachable",
      message: expect.stringMatching(/has said nothing for 0.1 s/),
    });
  });
});

test("the address that OpenAI's clients are given names the same head", () => {
  for (const path of ["", "/", "/v1", "/v1/"]) {
    expect(new HeadClient(`http://127.0.0.1:8001${path}`).url).toBe("http://127.0.0.1:8001/");
  }
  expect(new HeadClient("http://proxy/mesh/v1").url).toBe("http://proxy/mesh/");
});

describe("what is no text", () => {
  const json = (status: number, error: object) => () => Response.json({ error }, { status });
  test.each([
    [
      "a refusal",
      json(400, { message: "too long; shorten it", type: "invalid_request_error", code: "context_length_exceeded" }),
      { code: "context_exceeded", message: "the head answers 400: too long", hint: "shorten it" },
    ],
    [
      "a full head",
      json(429, { message: "no room; wait", type: "rate_limit_error", code: "rate_limit_exceeded" }),
      { code: "no_room" },
    ],
    [
      "an error of a code that nobody knows",
      json(400, { message: "odd", type: "invalid_request_error", code: "odd" }),
      { code: "malformed", hint: "look at the head's log" },
    ],
    [
      "a web page",
      () => new Response("<html>", { status: 404 }),
      { code: "next_nonsense", message: expect.stringMatching(/status 404/) },
    ],
    [
      "something else that goes well",
      () => Response.json({}),
      { code: "next_nonsense", message: expect.stringMatching(/application\/json/) },
    ],
    [
      "events of something else",
      () => new Response("data: {}\n\n", { headers: EVENTS }),
      { code: "next_nonsense", message: expect.stringMatching(/no piece of a text/) },
    ],
  ])("%s is an error that says so", async (_, answer, expected) => {
    expect(await failureOf(clientOf(answer))).toMatchObject(expected);
  });

  test("nobody there, and no URL at all", async () => {
    const client = clientOf(() => new Response());
    await server!.stop(true);
    expect(await failureOf(client)).toMatchObject({
      code: "next_unreachable",
      message: expect.stringMatching(/cannot be reached: nothing listens/),
    });
    expect(() => new HeadClient("localhost")).toThrow("--head localhost is not a URL");
  });
});
