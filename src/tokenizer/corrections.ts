import {
  ByteFallbackDecoder,
  ByteLevelPreTokenizer,
  type Decoder,
  type PreTokenizer,
  SequenceDecoder,
  SequencePreTokenizer,
  type Tokenizer,
} from "@huggingface/tokenizers";

/** Puts right, in place, what @huggingface/tokenizers 0.2.0 does otherwise than the Rust tokenizers 0.23. */
export function correct(tokenizer: Tokenizer): Tokenizer {
  for (const part of preTokenizers(tokenizer.pre_tokenizer)) {
    if (part instanceof ByteLevelPreTokenizer) part.pattern = GPT2_WORDS;
  }
  for (const part of decoders(tokenizer.decoder)) {
    if (part instanceof ByteFallbackDecoder) part.decode_chain = decodeByteFallback;
  }
  return tokenizer;
}

/** GPT-2's pattern. JavaScript's `\s` would take U+FEFF for a space, and U+0085 for none. */
const GPT2_WORDS =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** A run of `<0xF0>`-like tokens is UTF-8, a leading U+FEFF kept; if it is not valid, each is one U+FFFD. */
function decodeByteFallback(tokens: string[]): string[] {
  const texts: string[] = [];
  let run: number[] = [];
  const endRun = () => {
    if (run.length > 0) texts.push(decodeRun(run));
    run = [];
  };
  for (const token of tokens) {
    const hex = /^<0x([0-9A-Fa-f]{2})>$/.exec(token)?.[1];
    if (hex !== undefined) run.push(parseInt(hex, 16));
    else {
      endRun();
      texts.push(token);
    }
  }
  endRun();
  return texts;
}

function decodeRun(run: number[]): string {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(run));
  } catch {
    return "\ufffd".repeat(run.length);
  }
}

const preTokenizers = (part: PreTokenizer | null): PreTokenizer[] =>
  part instanceof SequencePreTokenizer ? part.tokenizers.flatMap(preTokenizers) : part ? [part] : [];

const decoders = (part: Decoder | null): Decoder[] =>
  part instanceof SequenceDecoder ? part.decoders.flatMap(decoders) : part ? [part] : [];
