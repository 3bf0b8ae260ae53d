import type { Tokenizer } from "@huggingface/tokenizers";

/** How the library cuts a text up that holds no added token any more: with words, then with the model. */
type PreTokenizer = (text: string, options?: object) => string[];
type Model = (words: string[]) => string[];

/** A text with its masks, on its way through the library from the pre-tokenizer to the model. */
interface Masked {
  readonly text: string;
  readonly options?: object;
}

/**
 * The library's tokenizer, seen so that `mask` is taken out of the text after added tokens have been found in it by their
 * spelling, and before the rest is cut up. A spelling with a mask in it is not found, and is text like any other.
 *
 * Some vocabularies have the added token as a word as well, and would make it of that text (Unigram's `</s>`): then this
 * stretch of text is cut at its masks.
 */
export function readingMasks(library: Tokenizer, mask: string, guarded: ReadonlySet<string>): Tokenizer {
  const model = library.model as unknown as Model;
  const preTokenizer = library.pre_tokenizer as unknown as PreTokenizer | null;
  const cutUp = (text: string, options?: object): string[] => {
    if (text === "") return [];
    return model(preTokenizer ? preTokenizer(text, options) : [text]);
  };
  const readMasked = ({ text, options }: Masked): string[] => {
    const tokens = cutUp(text.replaceAll(mask, ""), options);
    if (!tokens.some((token) => guarded.has(token))) return tokens;
    return text.split(mask).flatMap((part) => cutUp(part, options));
  };
  const { tokens_to_ids, unk_token_id } = library.model!;
  return Object.assign(Object.create(library) as Tokenizer, {
    pre_tokenizer: (text: string, options?: object): Masked => ({ text, options }),
    model: Object.assign(readMasked, { tokens_to_ids, unk_token_id }),
  });
}
