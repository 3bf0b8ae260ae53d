import type { Tokenizer } from "./tokenizer.ts";

/**
 * Text from token ids as they arrive. A character may be spread over several tokens: its beginning is held back until
 * it is whole, so no replacement character flashes up. All that was given out, joined, is the decoded text, with one
 * exception: where a run of byte-fallback tokens goes wrong, decoding at once makes U+FFFD of all of it, and what was
 * whole until then has been given out here.
 */
export class StreamingDecoder {
  readonly #decoder: { push(id: number): string; end(): string };
  readonly #skips: (id: number) => boolean;

  constructor(tokenizer: Tokenizer, { skipSpecialTokens = true }: { skipSpecialTokens?: boolean } = {}) {
    this.#skips = skipSpecialTokens ? (id) => tokenizer.isSpecial(id) : () => false;
    const { tokenBytes } = tokenizer;
    this.#decoder = tokenBytes ? new ByteDecoder(tokenBytes) : new WindowDecoder((ids) => tokenizer.decode(ids));
  }

  /** The text that this token completes, often empty. */
  push(id: number): string {
    return this.#skips(id) ? "" : this.#decoder.push(id);
  }

  /** What was held back, an unfinished character as U+FFFD. Then the decoder is as new. */
  end(): string {
    return this.#decoder.end();
  }
}

/** Byte-level BPE: the tokens' bytes are one stream of UTF-8. */
class ByteDecoder {
  readonly #utf8 = new TextDecoder("utf-8", { ignoreBOM: true });

  constructor(readonly tokenBytes: (id: number) => Uint8Array) {}

  push(id: number): string {
    return this.#utf8.decode(this.tokenBytes(id), { stream: true });
  }

  end(): string {
    return this.#utf8.decode();
  }
}

/** A character has at most four bytes, so more tokens than that without a whole one are not text at all. */
const MOST_HELD = 8;

/**
 * Any other tokenizer: a window of tokens is decoded again with each new one, and the difference given out. The window
 * begins with tokens already given out, because the first token of a sequence may lose its space.
 */
class WindowDecoder {
  #window: number[] = [];
  /** So many tokens at the window's beginning are given out already. */
  #given = 0;

  constructor(readonly decode: (ids: number[]) => string) {}

  push(id: number): string {
    this.#window.push(id);
    const delta = this.#delta();
    const held = this.#window.length - this.#given;
    if (delta === "" || (delta.endsWith("\ufffd") && held < MOST_HELD)) return "";
    this.#window = this.#window.slice(this.#given);
    this.#given = this.#window.length;
    return delta;
  }

  end(): string {
    const delta = this.#delta();
    this.#window = [];
    this.#given = 0;
    return delta;
  }

  #delta(): string {
    return this.decode(this.#window).slice(this.decode(this.#window.slice(0, this.#given)).length);
  }
}
