import { readFileSync } from "node:fs";
import { messageOf, UserError } from "../../base/errors.ts";
import { loadTokenizer, type Tokenizer } from "../../tokenizer/tokenizer.ts";
import { VERIFY_TEXT } from "./built-in-text.ts";

/** Long enough for attention to matter, short enough for any device. */
export const DEFAULT_CONTEXT = 256;
/** Logits of bfloat16 are kept on the host while the encodings run: a longer text is cut. */
const MAX_LOGIT_BYTES = 2 ** 29;

/**
 * A text as sequences of at most a context's tokens, each of at least two: one that is predicted.
 * @throws UserError `bad_usage` for a file that cannot be read or is too short, and what `loadTokenizer` throws.
 */
export async function readSequences(
  directory: string,
  file: string | undefined,
  { maxContext, vocabSize }: { maxContext: number; vocabSize: number },
): Promise<Int32Array[]> {
  const tokenizer = await tokenizerOf(directory);
  const ids = tokenizer.encode(readText(file)).slice(0, Math.floor(MAX_LOGIT_BYTES / (vocabSize * 2)));
  const sequences: Int32Array[] = [];
  for (let first = 0; first + 1 < ids.length; first += maxContext) {
    sequences.push(Int32Array.from(ids.slice(first, first + maxContext)));
  }
  if (sequences.length > 0) return sequences;
  throw new UserError(
    "bad_usage",
    `the text has ${ids.length} tokens, and verify needs two at least`,
    "give more text: a few hundred tokens make the figures mean something",
  );
}

async function tokenizerOf(directory: string): Promise<Tokenizer> {
  try {
    return await loadTokenizer(directory);
  } catch (cause) {
    if (!(cause instanceof UserError)) throw cause;
    const message = `verify reads a text and needs the model's tokenizer: ${cause.message}`;
    throw new UserError(cause.code, message, cause.hint, { cause });
  }
}

function readText(file: string | undefined): string {
  if (file === undefined) return VERIFY_TEXT;
  try {
    return readFileSync(file, "utf8");
  } catch (cause) {
    const message = `--text ${file} cannot be read: ${messageOf(cause)}`;
    throw new UserError("bad_usage", message, "give a file of plain text", { cause });
  }
}
