import { describe, expect, test } from "bun:test";
import { PageCache } from "../../src/engine/page-cache.ts";
import { pageDigest } from "../../src/engine/prefix.ts";
import { seededRandom } from "../support/safetensors.ts";

const ids = (...values: number[]): Int32Array => Int32Array.from(values);

describe("the page cache", () => {
  test("promises no more pages than there are", () => {
    const cache = new PageCache(10);
    expect(cache.reserve(7)).toBe(true);
    expect(cache.reserve(4)).toBe(false);
    expect(cache.reserve(3)).toBe(true);
    cache.unreserve(7);
    expect(cache.reserved).toBe(3);
  });

  test("lets a sequence begin with what another one left, as long as its place is not needed", () => {
    const cache = new PageCache(3);
    cache.reserve(2);
    const [first, second] = [cache.take(), cache.take()];
    const one = pageDigest(undefined, ids(1, 2));
    const two = pageDigest(one, ids(3, 4));
    cache.publish(first, one, undefined, ids(1, 2));
    cache.publish(second, two, one, ids(3, 4));
    expect(cache.share(two)).toEqual({ pages: [first, second], digests: [one, two], ids: ids(1, 2, 3, 4) });
    for (const page of [second, first, second, first]) cache.release(page);
    expect(cache.held).toBe(0);

    cache.take(); // the free one
    expect(cache.isPublished(two)).toBe(true);
    expect(cache.take()).toBe(second); // the end of a sequence goes before its beginning
    expect(cache.share(two)).toBeUndefined();
    expect(cache.share(one)!.pages).toEqual([first]);
  });

  test("does not let anybody write into what another sequence holds, nor begin with what was written over", () => {
    const cache = new PageCache(2);
    cache.reserve(2);
    const page = cache.take();
    const name = pageDigest(undefined, ids(5));
    cache.publish(page, name, undefined, ids(5));
    cache.share(name);
    expect(cache.own(page)).toBe(false);
    cache.release(page);
    expect(cache.own(page)).toBe(true);
    expect(cache.share(name)).toBeUndefined();
  });

  test("loses no page in 20,000 random steps of sequences that come, share, grow, cut back and go", () => {
    const random = seededRandom(41);
    const cache = new PageCache(24);
    const pick = <T>(list: readonly T[]): T => list[Math.floor(random() * list.length)]!;
    interface Sequence {
      reserved: number;
      pages: number[];
      digests: string[];
    }
    const sequences: Sequence[] = [];
    for (let step = 0; step < 20_000; step++) {
      const sequence = pick(sequences);
      const action = random();
      if (action < 0.2 || !sequence) {
        const reserved = 1 + Math.floor(random() * 8);
        if (cache.reserve(reserved)) sequences.push({ reserved, pages: [], digests: [] });
      } else if (action < 0.35 && sequence.pages.length === 0) {
        const other = pick(sequences);
        const digest = other.digests[Math.floor(random() * other.digests.length)];
        const prefix = digest === undefined ? undefined : cache.share(digest);
        if (prefix && prefix.pages.length <= sequence.reserved) {
          sequence.pages = [...prefix.pages];
          sequence.digests = [...prefix.digests];
        } else for (const page of prefix?.pages ?? []) cache.release(page);
      } else if (action < 0.75) {
        if (sequence.pages.length < sequence.reserved) {
          const page = cache.take();
          const before = sequence.digests.at(-1);
          const own = ids(Math.floor(random() * 3));
          if (sequence.digests.length === sequence.pages.length && random() < 0.8) {
            const digest = pageDigest(before, own);
            cache.publish(page, digest, before, own);
            sequence.digests.push(digest);
          }
          sequence.pages.push(page);
        }
      } else {
        const keep = action < 0.9 ? Math.floor(random() * (sequence.pages.length + 1)) : 0;
        for (const page of sequence.pages.splice(keep).toReversed()) cache.release(page);
        sequence.digests.splice(keep);
        if (action >= 0.9) {
          cache.unreserve(sequence.reserved);
          sequences.splice(sequences.indexOf(sequence), 1);
        }
      }
      expect(cache.held).toBe(new Set(sequences.flatMap(({ pages }) => pages)).size);
      expect(cache.reserved).toBe(sequences.reduce((total, { reserved }) => total + reserved, 0));
    }
    for (const { pages } of sequences) for (const page of pages) cache.release(page);
    expect(cache.held).toBe(0);
    expect(new Set(Array.from({ length: 24 }, () => cache.take())).size).toBe(24);
  });
});
