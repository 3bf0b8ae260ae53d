import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { StreamingDecoder } from "../../src/tokenizer/streaming-decoder.ts";
import { loadTokenizer, type Tokenizer } from "../../src/tokenizer/tokenizer.ts";
import { seededRandom } from "../support/safetensors.ts";
import { BYTE_FALLBACK, byteId, CASES, wordId, writeTokenizer } from "./support.ts";

const gpt2 = await loadTokenizer(join(import.meta.dir, "../fixtures/gpt2-tiny"));
const llama = await loadLlama();

describe("token by token, byte-level text is what decoding at once gives", () => {
  test.each(CASES)("%s", (_, { ids }) => {
    expect(stream(gpt2, ids).join("")).toBe(gpt2.decode(ids, { skipSpecialTokens: true }));
  });

  test("for 2,000 random runs of tokens, most of them not valid UTF-8", () => {
    const random = seededRandom(11);
    for (let round = 0; round < 2000; round++) {
      const ids = Array.from({ length: 1 + random() * 12 }, () => Math.floor(random() * 300));
      expect(stream(gpt2, ids).join("")).toBe(gpt2.decode(ids));
    }
  });
});

test.each([
  ["byte-level", gpt2],
  ["byte-fallback", llama],
])("an emoji of a %s tokenizer appears whole, with its last byte", (_, tokenizer) => {
  const pieces = stream(tokenizer, tokenizer.encode("a😀b", { addSpecialTokens: false }));
  expect(pieces.filter((piece) => piece !== "")).toEqual(["a", "😀", "b"]);
});

test("special tokens are skipped, unless they are wanted", () => {
  const ids = gpt2.encode("a<|endoftext|>b");
  expect(stream(gpt2, ids).join("")).toBe("ab");
  expect(stream(gpt2, ids, { skipSpecialTokens: false }).join("")).toBe("a<|endoftext|>b");
});

test("an unfinished character is given out at the end, and the decoder begins anew", () => {
  for (const tokenizer of [gpt2, llama]) {
    const decoder = new StreamingDecoder(tokenizer);
    const [first = -1, second = -1] = tokenizer.encode("😀", { addSpecialTokens: false }).slice(-4);
    expect(decoder.push(first) + decoder.push(second)).toBe("");
    expect(decoder.end()).toMatch(/^\ufffd+$/);
    expect(decoder.end()).toBe("");
  }
});

describe("a byte-fallback tokenizer streams", () => {
  test.each(["a b ab", "  ab a", "é😀a日本", " "])("%p as decoding at once gives it", (text) => {
    const ids = llama.encode(text);
    expect(stream(llama, ids).join("")).toBe(text);
  });

  test("the space of every word but the first", () => {
    expect(stream(llama, [wordId("▁a"), wordId("▁b"), wordId("▁ab")])).toEqual(["a", " b", " ab", ""]);
  });

  test("bytes that are no text without holding them for ever", () => {
    const pieces = stream(
      llama,
      Array.from({ length: 40 }, () => byteId(0x80)),
    );
    expect(pieces.slice(0, -1).join("").length).toBeGreaterThan(24);
  });
});

function stream(tokenizer: Tokenizer, ids: number[], options?: { skipSpecialTokens: boolean }): string[] {
  const decoder = new StreamingDecoder(tokenizer, options);
  return [...ids.map((id) => decoder.push(id)), decoder.end()];
}

async function loadLlama(): Promise<Tokenizer> {
  using folder = writeTokenizer(BYTE_FALLBACK);
  return await loadTokenizer(folder.path);
}
