import { Tokenizer as Library } from "@huggingface/tokenizers";
import { messageOf } from "../base/errors.ts";
import { byteLevelBytes } from "./byte-level.ts";
import { correct } from "./corrections.ts";
import { readingMasks } from "./masked.ts";
import {
  type AddedToken,
  broken,
  readTokenizerFiles,
  type TokenizerConfig,
  type TokenizerJson,
} from "./tokenizer-files.ts";

/** Text to token ids and back, as transformers does it. */
export interface Tokenizer {
  /** One more than the largest token id. */
  readonly vocabSize: number;
  /** sha256 in hex over the tokenizer's files. */
  readonly digest: string;
  /** What is added (a BOS, usually) the model's own post-processor decides; by default it is. */
  encode(text: string, options?: { addSpecialTokens?: boolean }): number[];
  /** Ids the vocabulary does not have are dropped. By default special tokens are written out. */
  decode(ids: Iterable<number>, options?: { skipSpecialTokens?: boolean }): string;
  isSpecial(id: number): boolean;
  /** The tokens that are found in text by their spelling, before the rest of it is cut up. */
  readonly addedTokens: readonly { readonly id: number; readonly content: string; readonly special: boolean }[];
  /**
   * Encodes text, special tokens not added, in which `mask`, a character that means nothing else, stands in the spelling
   * of added tokens that are to be read as ordinary text. The rest is as `encode` has it; the mask leaves no trace, but
   * where the vocabulary would make one of the `guarded` tokens of the ordinary text, that is cut at the masks.
   */
  encodeMasked(text: string, mask: string, guarded: ReadonlySet<string>): number[];
  /**
   * Byte-level BPE only, where the text is the tokens' bytes one after the other: those of one token, none if unknown.
   * Other tokenizers have no such function, for what a token says there depends on its neighbours.
   */
  readonly tokenBytes: ((id: number) => Uint8Array) | undefined;
}

/**
 * Reads the tokenizer of a model's directory. Throws UserError `bad_model` that names the file it could not use.
 */
export async function loadTokenizer(directory: string): Promise<Tokenizer> {
  const { json, config, digest } = readTokenizerFiles(directory);
  const specialTokens = [...json.added_tokens.filter(({ special }) => special), ...namedSpecialTokens(json, config)];
  const specialIds = new Set(specialTokens.map(({ id }) => id));
  const library = build(json, specialTokens, config, directory);
  const tokenBytes = isByteLevel(json) ? byteLevelBytes((id) => library.id_to_token(id)) : undefined;

  const encode = (from: Library, text: string, addSpecialTokens: boolean): number[] =>
    from.encode(text, { add_special_tokens: addSpecialTokens }).ids.filter((id) => id !== undefined); // a character without a token, in a vocabulary without <unk>

  const kept = (ids: Iterable<number>, skipSpecialTokens: boolean): number[] =>
    [...ids].filter((id) => library.id_to_token(id) !== undefined && !(skipSpecialTokens && specialIds.has(id)));

  return {
    vocabSize:
      library
        .get_vocab()
        .values()
        .reduce((largest, id) => Math.max(largest, id), -1) + 1,
    digest,
    addedTokens: [...specialTokens, ...json.added_tokens.filter(({ special }) => !special)],
    encode: (text, { addSpecialTokens = true } = {}) => encode(library, text, addSpecialTokens),
    encodeMasked: (text, mask, guarded) => encode(readingMasks(library, mask, guarded), text, false),
    decode(ids, { skipSpecialTokens = false } = {}) {
      const known = kept(ids, skipSpecialTokens);
      if (tokenBytes) return decodeUtf8(known.map(tokenBytes));
      return known.length === 0 ? "" : library.decode(known, { clean_up_tokenization_spaces: false });
    },
    isSpecial: (id) => specialIds.has(id),
    tokenBytes,
  };
}

function build(json: TokenizerJson, specialTokens: AddedToken[], config: TokenizerConfig, directory: string): Library {
  const ordinary = json.added_tokens.filter(({ special }) => !special);
  try {
    return correct(new Library({ ...json, added_tokens: [...specialTokens, ...ordinary] }, config));
  } catch (cause) {
    throw broken(`the tokenizer in ${directory} cannot be used: ${messageOf(cause)}`, cause);
  }
}

const NAMES = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"].map((name) => `${name}_token`);

/**
 * A token that tokenizer_config.json names as end of text or the like is special, even where tokenizer.json has it as
 * an ordinary entry of the vocabulary (transformers, `tokenization_utils_tokenizers.py`).
 */
function namedSpecialTokens(json: TokenizerJson, config: TokenizerConfig): AddedToken[] {
  const vocab = json.model?.vocab;
  if (typeof vocab !== "object" || vocab === null || Array.isArray(vocab)) return [];
  const others = config["additional_special_tokens"];
  const named = [...NAMES.map((name) => config[name]), ...(Array.isArray(others) ? others : [])].map(contentOf);
  return [...new Set(named)].flatMap((content) => {
    const id = content !== undefined && Object.hasOwn(vocab, content) && (vocab as Record<string, number>)[content];
    const known = json.added_tokens.some((token) => token.content === content && token.special);
    return typeof id === "number" && !known ? [{ id, content: content!, special: true, normalized: false }] : [];
  });
}

/** Such a field is a string, or an object with its content. */
function contentOf(field: unknown): string | undefined {
  const content = typeof field === "object" && field !== null && "content" in field ? field.content : field;
  return typeof content === "string" ? content : undefined;
}

const isByteLevel = ({ decoder }: TokenizerJson): boolean =>
  typeof decoder === "object" && decoder !== null && "type" in decoder && decoder.type === "ByteLevel";

const decodeUtf8 = (pieces: Uint8Array[]): string =>
  new TextDecoder("utf-8", { ignoreBOM: true }).decode(Buffer.concat(pieces));
