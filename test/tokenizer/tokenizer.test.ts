import { describe, expect, test } from "bun:test";
import { copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { loadTokenizer } from "../../src/tokenizer/tokenizer.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { BYTE_FALLBACK, byteId, CASES, wordId, writeTokenizer } from "./support.ts";

const FIXTURE = join(import.meta.dir, "../fixtures/gpt2-tiny");
const END_OF_TEXT = 1023;

describe("tokenizer.json cuts text as transformers does", async () => {
  const tokenizer = await loadTokenizer(FIXTURE);
  test.each(CASES)("%s", (_, { text, ids, decoded }) => {
    expect(tokenizer.encode(text)).toEqual(ids);
    expect(tokenizer.decode(ids)).toBe(decoded);
  });
});

test("merges.txt with the line ends of Windows says the same", async () => {
  using folder = copyOf("vocab.json", "merges.txt");
  const path = join(folder.path, "merges.txt");
  writeFileSync(path, readFileSync(path, "utf8").replaceAll("\n", "\r\n"));
  const { text, vocab_and_merges_ids: ids } = CASES.find(([, { text }]) => text.length > 20)![1];
  expect((await loadTokenizer(folder.path)).encode(text)).toEqual(ids);
});

describe("vocab.json and merges.txt cut text as transformers does", async () => {
  using folder = copyOf("vocab.json", "merges.txt");
  const tokenizer = await loadTokenizer(folder.path);
  test.each(CASES)("%s", (_, { text, vocab_and_merges_ids: ids }) => {
    expect(tokenizer.encode(text)).toEqual(ids);
  });
});

test("the vocabulary ends after its largest id", async () => {
  expect((await loadTokenizer(FIXTURE)).vocabSize).toBe(1024);
});

test("spaces before punctuation stay where they were", async () => {
  const tokenizer = await loadTokenizer(FIXTURE);
  const text = "a . b , c do n't";
  expect(tokenizer.decode(tokenizer.encode(text))).toBe(text);
});

test("special tokens are written out, or skipped on demand", async () => {
  const tokenizer = await loadTokenizer(FIXTURE);
  const ids = tokenizer.encode("a<|endoftext|>b");
  expect(ids).toContain(END_OF_TEXT);
  expect(tokenizer.decode(ids)).toBe("a<|endoftext|>b");
  expect(tokenizer.decode(ids, { skipSpecialTokens: true })).toBe("ab");
  expect(tokenizer.isSpecial(END_OF_TEXT)).toBe(true);
});

test("ids without a token are dropped, and no ids are no text", async () => {
  const tokenizer = await loadTokenizer(FIXTURE);
  expect(tokenizer.decode([])).toBe("");
  expect(tokenizer.decode([99_999, -1, 1.5])).toBe("");
  expect(tokenizer.decode(Int32Array.of(99_999, 64))).toBe("a");
});

test("U+FEFF is no space, and U+0085 is one", async () => {
  // With these merges a token spans the two characters only if the pattern did not part them.
  using folder = writeTokenizer(
    byteLevel({ "ï»¿!": 1, Â: 2, ħ: 3, "!": 4, ï: 5, "»": 6, "¿": 7, "ï»": 8, "ï»¿": 9, Âħ: 10, "Âħ!": 11 }, [
      "ï »",
      "ï» ¿",
      "ï»¿ !",
      "Â ħ",
      "Âħ !",
    ]),
  );
  const tokenizer = await loadTokenizer(folder.path);
  expect(tokenizer.encode("\ufeff!")).toEqual([1]);
  expect(tokenizer.encode("\u0085!")).toEqual([10, 4]);
});

test("a token that only tokenizer_config.json names as special is special", async () => {
  using folder = writeTokenizer(byteLevel({ a: 0, "</s>": 1, "<": 2, "/": 3, s: 4, ">": 5, "<pad>": 6 }, []), {
    eos_token: { content: "</s>", __type: "AddedToken" },
    pad_token: "<pad>",
    unk_token: "not in the vocabulary",
  });
  const tokenizer = await loadTokenizer(folder.path);
  expect(tokenizer.encode("a</s>a<pad>")).toEqual([0, 1, 0, 6]);
  expect(tokenizer.decode([0, 1, 0, 6], { skipSpecialTokens: true })).toBe("aa");
});

describe("a byte-fallback tokenizer", async () => {
  using folder = writeTokenizer(BYTE_FALLBACK);
  const tokenizer = await loadTokenizer(folder.path);

  test("begins with its BOS unless asked not to", () => {
    expect(tokenizer.encode("a b")).toEqual([wordId("<s>"), wordId("▁a"), wordId("▁b")]);
    expect(tokenizer.encode("a b", { addSpecialTokens: false })).toEqual([wordId("▁a"), wordId("▁b")]);
  });

  test.each(["a b", " a b", "  ab", "aé😀b", "\ufeffa"])("gives %p back", (text) => {
    expect(tokenizer.decode(tokenizer.encode(text), { skipSpecialTokens: true })).toBe(text);
  });

  test("gives one U+FFFD per byte of a run that is not UTF-8", () => {
    expect(tokenizer.decode([0xe2, 0x82, 0x41].map(byteId))).toBe("\ufffd\ufffd\ufffd");
  });
});

describe("the tokenizer's digest", () => {
  test("is the same for a copy elsewhere", async () => {
    using copy = copyOf("tokenizer.json", "tokenizer_config.json");
    expect((await loadTokenizer(copy.path)).digest).toBe((await loadTokenizer(FIXTURE)).digest);
  });

  test("changes with any byte of its files", async () => {
    using copy = copyOf("tokenizer.json");
    writeFileSync(join(copy.path, "tokenizer_config.json"), "{}");
    expect((await loadTokenizer(copy.path)).digest).not.toBe((await loadTokenizer(FIXTURE)).digest);
  });
});

describe("a tokenizer that cannot be read is refused, with its file named", () => {
  test.each([
    ["has neither tokenizer.json nor vocab.json", {}],
    ["has vocab.json without merges.txt", { "vocab.json": "{}" }],
    ["tokenizer.json is not valid JSON", { "tokenizer.json": "{" }],
    ["tokenizer.json is not a JSON object", { "tokenizer.json": "[]" }],
    ["cannot be used", { "tokenizer.json": "{}" }],
    ["Unknown", { "tokenizer.json": JSON.stringify({ ...byteLevel({}, []), decoder: { type: "Rot13" } }) }],
    ["tokenizer_config.json is not valid JSON", { "tokenizer.json": "{}", "tokenizer_config.json": "?" }],
  ])("%s", async (problem, files) => {
    using folder = temporaryFolder();
    for (const [name, text] of Object.entries(files)) writeFileSync(join(folder.path, name), text);
    await expect(loadTokenizer(folder.path)).rejects.toMatchObject({
      code: "bad_model",
      message: expect.stringContaining(problem),
    });
  });
});

function byteLevel(vocab: Record<string, number>, merges: string[]) {
  const part = { type: "ByteLevel", add_prefix_space: false, use_regex: true };
  return { model: { type: "BPE", vocab, merges }, pre_tokenizer: part, decoder: part };
}

function copyOf(...names: string[]) {
  const folder = temporaryFolder();
  for (const name of names) copyFileSync(join(FIXTURE, name), join(folder.path, name));
  return folder;
}
