/** A page whose tokens are known, so that another sequence can begin with it. */
interface Published {
  readonly page: number;
  /** The page before it; undefined: it is a sequence's first. */
  readonly before: string | undefined;
  /** [page tokens] */
  readonly ids: Int32Array;
}

/** A beginning of a sequence that lies in the cache. */
export interface Prefix {
  readonly pages: readonly number[];
  readonly digests: readonly string[];
  readonly ids: Int32Array;
}

/**
 * Which page of the cache belongs to whom. A page is free, held by one or more sequences, or kept: nobody holds it, but
 * its tokens are known and a new sequence may begin with them, until its place is needed.
 *
 * Sequences reserve before they take: reserved pages never exceed all pages, and held ones never the reserved, so taking
 * cannot fail. Numbers only; the memory itself is on the device.
 */
export class PageCache {
  readonly pages: number;
  readonly #free: number[];
  readonly #holders: Uint32Array;
  readonly #published = new Map<string, Published>();
  readonly #digests = new Map<number, string>();
  /** Those that nobody holds, the longest unused first. */
  readonly #kept = new Set<number>();
  #reserved = 0;

  constructor(pages: number) {
    this.pages = pages;
    this.#free = Array.from({ length: pages }, (_, index) => pages - 1 - index);
    this.#holders = new Uint32Array(pages);
  }

  get reserved(): number {
    return this.#reserved;
  }

  /** Pages that at least one sequence holds. */
  get held(): number {
    return this.pages - this.#free.length - this.#kept.size;
  }

  /** Promises that many pages to a sequence, or gives false where not as many are left. */
  reserve(pages: number): boolean {
    if (this.#reserved + pages > this.pages) return false;
    this.#reserved += pages;
    return true;
  }

  unreserve(pages: number): void {
    this.#reserved -= pages;
  }

  /** A page for one holder, whose contents are anything. */
  take(): number {
    let page = this.#free.pop();
    if (page === undefined) {
      page = this.#kept.values().next().value;
      if (page === undefined) throw new Error("more pages are taken than were reserved");
      this.#kept.delete(page);
      this.#forget(page);
    }
    this.#holders[page] = 1;
    return page;
  }

  /** The holder that took or shared a page does not need it any more. */
  release(page: number): void {
    if (--this.#holders[page]! > 0) return;
    if (this.#digests.has(page)) this.#kept.add(page);
    else this.#free.push(page);
  }

  /** Whether the page is one holder's alone, to write into. If so, nobody can begin with its old tokens any more. */
  own(page: number): boolean {
    if (this.#holders[page]! > 1) return false;
    this.#forget(page);
    return true;
  }

  /** A full page's tokens are known. Where another page has the same ones, that stays the one to begin with. */
  publish(page: number, digest: string, before: string | undefined, ids: Int32Array): void {
    if (this.#published.has(digest)) return;
    this.#published.set(digest, { page, before, ids });
    this.#digests.set(page, digest);
  }

  isPublished(digest: string): boolean {
    return this.#published.has(digest);
  }

  /** Everything up to the page of that name, and held from now on; undefined where a part of it is gone. */
  share(digest: string): Prefix | undefined {
    const chain: Published[] = [];
    const digests: string[] = [];
    for (let name: string | undefined = digest; name !== undefined;) {
      const link = this.#published.get(name);
      if (!link) return undefined;
      chain.unshift(link);
      digests.unshift(name);
      name = link.before;
    }
    for (const { page } of chain) {
      this.#kept.delete(page);
      this.#holders[page]!++;
    }
    const ids = Int32Array.from(chain.flatMap((link) => Array.from(link.ids)));
    return { pages: chain.map(({ page }) => page), digests, ids };
  }

  #forget(page: number): void {
    const digest = this.#digests.get(page);
    if (digest === undefined) return;
    this.#digests.delete(page);
    this.#published.delete(digest);
  }
}
