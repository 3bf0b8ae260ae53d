import { existsSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { messageOf, UserError } from "../base/errors.ts";

/** What `tokenizer.json` holds, as far as this folder reads it (huggingface/tokenizers, `Tokenizer::from_str`). */
export interface TokenizerJson {
  model: { vocab?: unknown };
  added_tokens: AddedToken[];
  [section: string]: unknown;
}

export interface AddedToken {
  id: number;
  content: string;
  special: boolean;
  normalized?: boolean;
}

export type TokenizerConfig = Record<string, unknown>;

export interface TokenizerFiles {
  json: TokenizerJson;
  config: TokenizerConfig;
  /** sha256 over the names and bytes of the files that were read: two nodes with the same one cut text alike. */
  digest: string;
}

/**
 * `tokenizer.json`, or for an old GPT-2 the pair `vocab.json` and `merges.txt`; beside it `tokenizer_config.json`, if
 * there. Throws UserError `bad_model` naming the missing or broken file.
 */
export function readTokenizerFiles(directory: string): TokenizerFiles {
  const reader = new FolderReader(directory);
  const json = reader.has("tokenizer.json") ? complete(reader.object("tokenizer.json")) : fromVocabAndMerges(reader);
  checkModel(json, reader.has("tokenizer.json") ? "tokenizer.json" : "vocab.json and merges.txt");
  const config = reader.has("tokenizer_config.json") ? reader.object("tokenizer_config.json") : {};
  return { json, config, digest: reader.digest() };
}

/** TOKJS wants every section there, if only null; the format lets them be absent. */
function complete(json: Record<string, unknown>): TokenizerJson {
  const empty = { normalizer: null, pre_tokenizer: null, post_processor: null, decoder: null, added_tokens: [] };
  const whole = { ...empty, ...json } as unknown as TokenizerJson;
  if (!Array.isArray(whole.added_tokens)) throw broken("tokenizer.json: added_tokens is not a list");
  return whole;
}

/** No vocabulary comes near; one id beyond it would make a table of that length. */
const MOST_TOKENS = 10_000_000;

/** What the library takes without a word and then gets wrong: an id that is none, a merge of what is not in the vocabulary. */
function checkModel({ model, added_tokens }: TokenizerJson, file: string): void {
  const { type, vocab, merges, continuing_subword_prefix: prefix } = (model ?? {}) as Record<string, unknown>;
  const isTable = typeof vocab === "object" && vocab !== null && !Array.isArray(vocab);
  const entries: [string, unknown][] = isTable ? Object.entries(vocab) : [];
  for (const [token, id] of [...entries, ...added_tokens.map((added) => [added?.content, added?.id] as const)]) {
    if (Number.isInteger(id) && (id as number) >= 0 && (id as number) < MOST_TOKENS) continue;
    throw broken(
      `${file}: the token ${JSON.stringify(token)} has the id ${JSON.stringify(id)}, and ids are whole numbers from 0`,
    );
  }
  if (type !== "BPE" || !isTable || !Array.isArray(merges)) return;
  const continued = typeof prefix === "string" ? prefix : "";
  const joined = ([a, b]: string[]) => a! + (b!.startsWith(continued) ? b!.slice(continued.length) : b!);
  merges.forEach((merge: unknown, index) => {
    const parts = typeof merge === "string" ? merge.split(" ") : merge;
    const isPair = Array.isArray(parts) && parts.length === 2;
    if (isPair && [...parts, joined(parts)].every((part) => Object.hasOwn(vocab, part))) return;
    throw broken(
      `${file}: merge ${index} is ${JSON.stringify(merge)}, and a merge is two tokens of the vocabulary that make a third`,
    );
  });
}

const END_OF_TEXT = "<|endoftext|>";

/** GPT-2's tokenizer as transformers builds it from its two files (`models/gpt2/tokenization_gpt2.py`). */
function fromVocabAndMerges(reader: FolderReader): TokenizerJson {
  const vocab = reader.object("vocab.json");
  const [first = "", ...rest] = reader.text("merges.txt").split(/\r?\n/);
  const merges = first.startsWith("#version") ? rest : [first, ...rest]; // "# #" may be a merge; "#version" is none
  if (merges.every((line) => line.trim() === "")) throw broken("merges.txt has no merge");
  const endOfText = vocab[END_OF_TEXT];
  const byteLevel = { type: "ByteLevel", add_prefix_space: false, use_regex: true };
  return {
    model: {
      type: "BPE",
      unk_token: null,
      continuing_subword_prefix: "",
      end_of_word_suffix: "",
      vocab,
      merges: merges.filter((line) => line.trim() !== "").map((line) => line.split(" ")),
    } as { vocab: unknown },
    added_tokens: typeof endOfText === "number" ? [{ id: endOfText, content: END_OF_TEXT, special: true }] : [],
    normalizer: null,
    pre_tokenizer: byteLevel,
    post_processor: null,
    decoder: byteLevel,
  };
}

class FolderReader {
  readonly #digest = new Bun.CryptoHasher("sha256");

  constructor(readonly directory: string) {}

  has(name: string): boolean {
    return existsSync(join(this.directory, name));
  }

  text(name: string): string {
    if (!this.has(name)) throw missing(this.directory, name);
    const bytes = this.#bytes(name);
    this.#digest.update(`${name}\0${bytes.length}\0`).update(bytes);
    return bytes.toString("utf8");
  }

  #bytes(name: string): Buffer {
    const path = join(this.directory, name);
    try {
      if (!statSync(path).isFile()) throw new Error("it is not a file");
      return readFileSync(path);
    } catch (cause) {
      throw new UserError("bad_model", `${path} cannot be read: ${messageOf(cause)}`, "let this user read it", {
        cause,
      });
    }
  }

  object(name: string): Record<string, unknown> {
    let value: unknown;
    try {
      value = JSON.parse(this.text(name));
    } catch (cause) {
      if (!(cause instanceof SyntaxError)) throw cause;
      throw broken(`${join(this.directory, name)} is not valid JSON: ${messageOf(cause)}`, cause);
    }
    if (typeof value === "object" && value !== null && !Array.isArray(value)) return value as Record<string, unknown>;
    throw broken(`${join(this.directory, name)} is not a JSON object`);
  }

  digest(): string {
    return this.#digest.digest("hex");
  }
}

export const broken = (problem: string, cause?: unknown): UserError =>
  new UserError("bad_model", problem, "the tokenizer's files are damaged or of an unknown kind: fetch them again", {
    cause,
  });

function missing(directory: string, name: string): UserError {
  const alternative = name === "merges.txt" ? "vocab.json without merges.txt" : "neither tokenizer.json nor vocab.json";
  return new UserError(
    "bad_model",
    `${directory} has ${alternative}`,
    existsSync(join(directory, "tokenizer.model"))
      ? "it has only a SentencePiece file: save it with transformers' AutoTokenizer, which writes tokenizer.json"
      : "put the model's tokenizer.json into the directory",
  );
}
