import { writeFileSync } from "node:fs";
import { join } from "node:path";
import cases from "../fixtures/gpt2-tiny/tokenizer-cases.json";
import { temporaryFolder } from "../support/safetensors.ts";

/** What transformers makes of odd texts, each with a name that a terminal can show. */
export const CASES = cases.map((row) => [JSON.stringify(row.text).slice(0, 60), row] as const);

/** A folder with these as tokenizer.json and tokenizer_config.json. */
export function writeTokenizer(json: object, config?: object) {
  const folder = temporaryFolder();
  writeFileSync(join(folder.path, "tokenizer.json"), JSON.stringify(json));
  if (config) writeFileSync(join(folder.path, "tokenizer_config.json"), JSON.stringify(config));
  return folder;
}

const byteTokens = Array.from({ length: 256 }, (_, byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`);
const words = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab"];
const vocabulary = ["<unk>", "<s>", "</s>", "<pad>", ...byteTokens, ...words];

/** The id of the token for a byte, and for a word, in `BYTE_FALLBACK`. */
export const byteId = (byte: number): number => byte + 4;
export const wordId = (word: string): number => vocabulary.indexOf(word);

/** A small tokenizer of Llama 2's kind: a space is ▁, one stands before the text, and unknown characters are bytes. */
export const BYTE_FALLBACK = {
  model: {
    type: "BPE",
    unk_token: "<unk>",
    fuse_unk: true,
    byte_fallback: true,
    vocab: Object.fromEntries(vocabulary.map((token, id) => [token, id])),
    merges: ["▁ a", "▁ b", "a b", "▁a b"],
  },
  added_tokens: ["<unk>", "<s>", "</s>"].map((content, id) => ({ id, content, special: true, normalized: false })),
  normalizer: {
    type: "Sequence",
    normalizers: [
      { type: "Prepend", prepend: "▁" },
      { type: "Replace", pattern: { String: " " }, content: "▁" },
    ],
  },
  pre_tokenizer: null,
  post_processor: {
    type: "TemplateProcessing",
    single: [{ SpecialToken: { id: "<s>", type_id: 0 } }, { Sequence: { id: "A", type_id: 0 } }],
    pair: [{ Sequence: { id: "A", type_id: 0 } }, { Sequence: { id: "B", type_id: 1 } }],
    special_tokens: { "<s>": { id: "<s>", ids: [1], tokens: ["<s>"] } },
  },
  decoder: {
    type: "Sequence",
    decoders: [
      { type: "Replace", pattern: { String: "▁" }, content: " " },
      { type: "ByteFallback" },
      { type: "Fuse" },
      { type: "Strip", content: " ", start: 1, stop: 0 },
    ],
  },
};
