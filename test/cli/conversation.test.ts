import { describe, expect, test } from "bun:test";
import { answerJson, describeSpeed, takeAnswer, tokensPerSecond, withoutControls } from "../../src/cli/answer.ts";
import { lines } from "../../src/cli/ask.ts";
import { Conversation, readLine } from "../../src/cli/conversation.ts";
import { onceEach } from "../../src/cli/strict.ts";
import type { TextEvent } from "../../src/mesh/head-client.ts";

describe("a line of a chat", () => {
  test.each([
    ["  How are you? ", { kind: "message", text: "How are you?" }],
    ["", { kind: "nothing" }],
    ["/Help", { kind: "help" }],
    ["/quit", { kind: "exit" }],
    ["/system Be brief. Please.", { kind: "system", text: "Be brief. Please." }],
    ["/system", { kind: "system", text: "" }],
    ["/sytsem x", { kind: "unknown", command: "/sytsem" }],
    ["//help", { kind: "message", text: "/help" }],
    ["/usr/bin is what?", { kind: "message", text: "/usr/bin is what?" }], // a path
    ["/ 2", { kind: "message", text: "/ 2" }],
  ])("%j is understood", (line, meaning) => {
    expect(readLine(line)).toEqual(meaning as never);
  });
});

test("a conversation is sent whole, its instructions first; a reset keeps these", () => {
  const talk = new Conversation("Be brief.");
  talk.add("a", "b");
  expect(talk.with("c").map(({ role, content }) => `${role}: ${content}`)).toEqual([
    "system: Be brief.",
    "user: a",
    "assistant: b",
    "user: c",
  ]);
  talk.reset();
  expect(talk.with("d").map(({ role }) => role)).toEqual(["system", "user"]);
  talk.system = "";
  expect(talk.with("d").map(({ role }) => role)).toEqual(["user"]);
});

describe("an answer", () => {
  const signal = new AbortController().signal;
  /** Pieces and when they come, with a clock that only they move. */
  function timed(...pieces: [at: number, event: TextEvent][]) {
    let clock = 1000;
    const events = (async function* () {
      for (const [at, event] of pieces) {
        clock = 1000 + at;
        yield event;
      }
    })();
    return takeAnswer(events, { signal, now: () => clock });
  }
  const usage = (completion: number) => ({ prompt: 2, completion, cached: 0 });

  test("is as fast as its tokens after the first one came", async () => {
    const answer = await timed(
      [500, { text: "a", finish: null }],
      [1500, { text: "b", finish: "stop" }],
      [9000, { text: "", finish: null, usage: usage(5) }],
    );
    expect(tokensPerSecond(answer)).toBe(4);
    expect(describeSpeed(answer)).toBe("5 tokens, the first after 0.50 s, then 4.0 tokens/s");
    expect(answerJson(answer)).toEqual({
      text: "ab",
      finish_reason: "stop",
      usage: { prompt_tokens: 2, completion_tokens: 5, cached_tokens: 0 },
      timing: { first_token_ms: 500, total_ms: 1500, tokens_per_second: 4 },
    });
  });

  test("whose pieces waited for each other is as fast as what came after them", async () => {
    const pieces = [500, 500.5, 501].map((at): [number, TextEvent] => [at, { text: "a", finish: null }]);
    const answer = await timed(...pieces, [1501, { text: "d", finish: "stop", usage: usage(5) }]);
    expect(tokensPerSecond(answer)).toBe(2);
    const together = await timed(...pieces, [501.5, { text: "", finish: "stop", usage: usage(3) }]);
    expect(tokensPerSecond(together)).toBeUndefined();
  });

  test("of one token has no speed", async () => {
    const answer = await timed([500, { text: "a", finish: "length", usage: usage(1) }]);
    expect(describeSpeed(answer)).toBe("1 token, the first after 0.50 s");
  });

  test("without a text says how many tokens there were", async () => {
    const answer = await timed([500, { text: "", finish: "stop", usage: usage(1) }]);
    expect(describeSpeed(answer)).toBe("1 token");
  });
});

describe("lines from a pipe", () => {
  async function* bytesOf(...chunks: string[]) {
    for (const chunk of chunks) yield Buffer.from(chunk, "latin1");
  }

  test("end at line breaks and at the end, wherever the chunks are cut", async () => {
    const text = "Gr\xc3\xbc\xc3\x9fe\r\n\nlast";
    for (let at = 0; at <= text.length; at++) {
      const got = await Array.fromAsync(lines(bytesOf(text.slice(0, at), text.slice(at))));
      expect({ at, got }).toEqual({ at, got: ["Grüße", "", "last"] });
    }
  });

  test("are refused at the first that is no UTF-8, after those before it", async () => {
    const reading = lines(bytesOf("a\ncaf\xe9\nb\n"));
    expect((await reading.next()).value).toBe("a");
    await expect(reading.next()).rejects.toThrow("line 2 of stdin is not text in UTF-8");
  });
});

test("what a model writes cannot steer a terminal", () => {
  expect(withoutControls("a\u001b[2Jb\r\u007f\u009b1m\tc\n🙂")).toBe("a␛[2Jb␍␡␡1m\tc\n🙂");
});

describe("a flag that may be given several times", () => {
  test.each([
    ["--stop a --x 1 --stop=b p", ["--stop=a", "--x", "1", "p"], ["a", "b"]],
    ["p --x", ["p", "--x"], []],
    ["--stop a -- --stop b", ["--stop=a", "--", "--stop", "b"], ["a"]], // behind -- all is text
    ["--stop a --stop --x", ["--stop=", "--x"], ["a", ""]], // without a value: the others do not hide it
    ["--stop", ["--stop="], [""]],
  ])("%s", (words, once, values) => {
    expect(onceEach("stop", words.split(" "))).toEqual({ once, values });
  });
});
