import { ceilDiv } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { PAGE_TOKENS } from "../nn/index.ts";
import type { PageCache } from "./page-cache.ts";
import type { OpenSession } from "./types.ts";

interface Waiter {
  readonly pages: number;
  readonly resolve: () => void;
  readonly refuse: () => void;
}

/** Gives sequences room in the cache: at once, when others have ended, or not at all. */
export class Room {
  readonly #cache: PageCache;
  readonly #waiters: Waiter[] = [];
  #passingPages = 0;

  constructor(cache: PageCache) {
    this.#cache = cache;
  }

  /**
   * Reserves pages for `maxLength` tokens; what it gives, gives them back.
   * @throws UserError `no_room`; the signal's reason.
   */
  async reserve({ maxLength, stay, signal }: OpenSession): Promise<() => void> {
    signal?.throwIfAborted();
    const pages = ceilDiv(maxLength, PAGE_TOKENS);
    if (stay === "lasting") {
      if (!this.#cache.reserve(pages)) throw noRoom(pages, maxLength, this.#cache);
      this.#refuse();
      return () => this.#giveBack(pages);
    }
    // Nobody overtakes those who wait.
    if (this.#waiters.length > 0 || !this.#take(pages)) await this.#wait(pages, maxLength, signal);
    return () => {
      this.#passingPages -= pages;
      this.#giveBack(pages);
    };
  }

  #take(pages: number): boolean {
    if (!this.#cache.reserve(pages)) return false;
    this.#passingPages += pages;
    return true;
  }

  #giveBack(pages: number): void {
    this.#cache.unreserve(pages);
    while (this.#waiters[0] && this.#take(this.#waiters[0].pages)) this.#waiters.shift()!.resolve();
  }

  #wait(pages: number, maxLength: number, signal: AbortSignal | undefined): Promise<void> {
    return new Promise((resolve, reject) => {
      const leave = () => {
        this.#waiters.splice(this.#waiters.indexOf(waiter), 1);
        reject(signal!.reason);
        this.#giveBack(0); // one behind it may need less
      };
      const settled = () => signal?.removeEventListener("abort", leave);
      const refuse = () => (settled(), reject(noRoom(pages, maxLength, this.#cache)));
      const waiter = { pages, resolve: () => (settled(), resolve()), refuse };
      signal?.addEventListener("abort", leave, { once: true });
      this.#waiters.push(waiter);
      this.#refuse();
    });
  }

  /** Those for which even the end of all that pass would make no room. */
  #refuse(): void {
    const lasting = this.#cache.reserved - this.#passingPages;
    for (const waiter of this.#waiters.filter(({ pages }) => lasting + pages > this.#cache.pages)) {
      this.#waiters.splice(this.#waiters.indexOf(waiter), 1);
      waiter.refuse();
    }
  }
}

function noRoom(pages: number, maxLength: number, cache: PageCache): UserError {
  return new UserError(
    "no_room",
    `${maxLength} tokens need ${pages} pages of the cache, and ${cache.pages - cache.reserved} of ${cache.pages} are not reserved`,
    "try again when a conversation has ended, ask for fewer tokens, or start the node with more --max-sessions",
  );
}
