import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { StreamingDecoder } from "../../src/tokenizer/streaming-decoder.ts";
import { loadTokenizer, type Tokenizer } from "../../src/tokenizer/tokenizer.ts";
import texts from "../fixtures/odd-tokenizers/texts.json";

interface Cases {
  readonly ids: number[][];
  readonly decoded: (string | null)[];
  readonly decoded_without_special: (string | null)[];
  readonly runs: { readonly ids: number[]; readonly decoded: string }[];
}

describe.each(["byte-level", "byte-fallback", "unigram"])("a %s tokenizer", async (kind) => {
  const folder = join(import.meta.dir, "../fixtures/odd-tokenizers", kind);
  const tokenizer = await loadTokenizer(folder);
  const cases = JSON.parse(readFileSync(join(folder, "cases.json"), "utf8")) as Cases;

  test(`cuts ${texts.length} odd texts as the Rust library does`, () => {
    expect(differing(texts.map((text, row) => [text, tokenizer.encode(text), cases.ids[row]!]))).toEqual([]);
  });

  test("gives their tokens back as the Rust library does", () => {
    const whole = cases.ids.map((ids, row) => [ids, tokenizer.decode(ids), cases.decoded[row] ?? texts[row]!] as const);
    expect(differing(whole)).toEqual([]);
    const bare = cases.ids.map(
      (ids, row) =>
        [
          ids,
          tokenizer.decode(ids, { skipSpecialTokens: true }),
          cases.decoded_without_special[row] ?? texts[row]!,
        ] as const,
    );
    expect(differing(bare)).toEqual([]);
  });

  test(`gives ${cases.runs.length} runs of random tokens back as the Rust library does`, () => {
    expect(differing(cases.runs.map(({ ids, decoded }) => [ids, tokenizer.decode(ids), decoded]))).toEqual([]);
  });

  test.each([false, true])("streams all of them to the same text; special tokens skipped: %p", (skipSpecialTokens) => {
    const all = [...cases.ids, ...cases.runs.map(({ ids }) => ids)];
    const rows = all.map(
      (ids) =>
        [
          ids,
          stream(tokenizer, ids, skipSpecialTokens).join(""),
          tokenizer.decode(ids, { skipSpecialTokens }),
        ] as const,
    );
    expect(differing(rows.filter(([, , whole]) => isDecidedByItsBeginning(whole)))).toEqual([]);
    expect(rows.filter(([, , whole]) => isDecidedByItsBeginning(whole)).length).toBeGreaterThan(1000);
  });

  /**
   * Byte-fallback makes U+FFFD of a whole run of bytes when any later one is wrong, also of characters before it. These
   * have been given out by then.
   */
  const isDecidedByItsBeginning = (whole: string) => kind !== "byte-fallback" || !whole.includes("\ufffd");

  test("never shows U+FFFD for a text that has none, and no half of a character", () => {
    for (const [row, ids] of cases.ids.entries()) {
      const decoded = cases.decoded_without_special[row] ?? texts[row]!;
      for (const piece of stream(tokenizer, ids, true)) {
        expect(piece.isWellFormed()).toBe(true);
        if (!decoded.includes("\ufffd")) expect(piece).not.toContain("\ufffd");
      }
    }
  });

  test("gives each character out with the token that completes it", () => {
    for (const ids of cases.ids) {
      const decoder = new StreamingDecoder(tokenizer);
      let given = "";
      for (const [index, id] of ids.entries()) {
        given += decoder.push(id);
        const soFar = tokenizer.decode(ids.slice(0, index + 1), { skipSpecialTokens: true });
        // What is still held is an unfinished character: at most its first three bytes, as U+FFFD.
        if (!soFar.slice(given.length).includes("\ufffd")) expect(given).toBe(soFar);
      }
    }
  });
});

const stream = (tokenizer: Tokenizer, ids: readonly number[], skipSpecialTokens: boolean): string[] => {
  const decoder = new StreamingDecoder(tokenizer, { skipSpecialTokens });
  return [...ids.map((id) => decoder.push(id)), decoder.end()];
};

/** The first rows whose two sides differ. */
function differing<T>(rows: readonly (readonly [unknown, T, T])[]) {
  return rows
    .filter(([, ours, theirs]) => !Bun.deepEquals(ours, theirs))
    .slice(0, 8)
    .map(([of, ours, theirs]) => ({ of, ours, theirs }));
}
