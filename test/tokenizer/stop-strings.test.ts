import { describe, expect, test } from "bun:test";
import { StopMatcher } from "../../src/tokenizer/stop-strings.ts";
import { seededRandom } from "../support/safetensors.ts";

test("a stop string that spans pieces ends the text before it, and is not given out", () => {
  const matcher = new StopMatcher(["\n\nUser:"]);
  expect(["Hi.", "\n", "\nUs", "er: more", "and more"].map((piece) => matcher.push(piece))).toEqual([
    "Hi.",
    "",
    "",
    "",
    "",
  ]);
  expect(matcher.stopped).toBe("\n\nUser:");
  expect(matcher.end()).toBe("");
});

test("what only began like a stop string is given out as soon as that is clear", () => {
  const matcher = new StopMatcher(["END."]);
  expect(["at the E", "N", "D", "!"].map((piece) => matcher.push(piece))).toEqual(["at the ", "", "", "END!"]);
  expect(matcher.stopped).toBeUndefined();
});

test("what is held when the text ends is given out then", () => {
  const matcher = new StopMatcher(["###"]);
  expect([matcher.push("a##"), matcher.end(), matcher.end()]).toEqual(["a", "##", ""]);
  expect(matcher.push("#b")).toBe("#b"); // a new text: the two before do not count
});

test("without stop strings nothing is held", () => {
  const matcher = new StopMatcher([]);
  expect([matcher.push("a"), matcher.push("b"), matcher.end()]).toEqual(["a", "b", ""]);
});

describe("of several stop strings", () => {
  test.each([
    ["the one that is complete first ends the text", ["abcd", "bc"], "xabcd", "xa", "bc"],
    ["the longest ends it where two are complete at once", ["bcd", "abcd"], "xabcd", "x", "abcd"],
    ["a prefix of another ends it first", ["ab", "abc"], "xabc", "x", "ab"],
    ["one that overlaps itself is found at its first place", ["aab"], "aaab", "a", "aab"],
    ["one given twice is one", ["x", "x"], "axb", "a", "x"],
  ])("%s", (_, stops, text, given, stopped) => {
    for (const pieces of [[text], [...text]]) {
      const matcher = new StopMatcher(stops);
      expect(pieces.map((piece) => matcher.push(piece)).join("") + matcher.end()).toBe(given);
      expect(matcher.stopped).toBe(stopped);
    }
  });
});

test("characters of two code units are held and given out whole", () => {
  const matcher = new StopMatcher(["😁!", "日本語"]);
  expect(["😀", "😁", "?", "日本", "人", "日本語"].map((piece) => matcher.push(piece))).toEqual([
    "😀",
    "",
    "😁?",
    "",
    "日本人",
    "",
  ]);
  expect(matcher.stopped).toBe("日本語");
});

test("an empty stop string is an error", () => {
  expect(() => new StopMatcher(["a", ""])).toThrow("a stop string is empty");
});

describe("for 3,000 random texts of few letters, cut anywhere,", () => {
  const random = seededRandom(17);
  const below = (count: number) => Math.floor(random() * count);
  const word = (most: number) => Array.from({ length: below(most) + 1 }, () => "ab😀c"[below(5)]!).join("");
  const rounds = Array.from({ length: 3000 }, () => ({
    stops: Array.from({ length: below(4) + 1 }, () => word(5)),
    text: word(40),
  }));

  test("the text given out, and the stop string, are those of the whole text's definition", () => {
    for (const { stops, text } of rounds) {
      const matcher = new StopMatcher(stops);
      const given =
        cut(text, below)
          .map((piece) => matcher.push(piece))
          .join("") + matcher.end();
      expect({ given, stopped: matcher.stopped }).toEqual(definition(text, stops));
    }
  });

  test("after every piece exactly what could begin a stop string is held", () => {
    for (const { stops, text } of rounds) {
      const matcher = new StopMatcher(stops);
      let seen = "";
      let given = "";
      for (const piece of cut(text, below)) {
        seen += piece;
        given += matcher.push(piece);
        if (matcher.stopped !== undefined) break;
        const held = longestBeginning(seen, stops);
        expect(given).toBe(seen.slice(0, seen.length - held));
      }
    }
  });
});

test("a long stop string and a long text that nearly matches it take no time", () => {
  const stop = `${"a".repeat(50_000)}b`;
  const matcher = new StopMatcher([stop]);
  const text = "a".repeat(200_000);
  const start = performance.now();
  for (let at = 0; at < text.length; at += 1000) matcher.push(text.slice(at, at + 1000));
  expect(performance.now() - start).toBeLessThan(3000);
  matcher.push("b");
  expect(matcher.stopped).toBe(stop);
});

function cut(text: string, below: (count: number) => number): string[] {
  const pieces: string[] = [];
  for (let at = 0; at < text.length;) {
    const length = below(6); // now and then an empty piece
    pieces.push(text.slice(at, at + length));
    at += length;
  }
  return pieces;
}

function definition(text: string, stops: string[]) {
  for (let end = 1; end <= text.length; end++) {
    const complete = stops.filter((stop) => text.slice(0, end).endsWith(stop)).toSorted((a, b) => b.length - a.length);
    if (complete[0] !== undefined) return { given: text.slice(0, end - complete[0].length), stopped: complete[0] };
  }
  return { given: text, stopped: undefined };
}

function longestBeginning(text: string, stops: string[]): number {
  for (let length = text.length; length > 0; length--) {
    const tail = text.slice(-length);
    if (stops.some((stop) => stop.length > length && stop.startsWith(tail))) return length;
  }
  return 0;
}
