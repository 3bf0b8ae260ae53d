import { HEADERS } from "../protocol/headers.ts";

/** A node that passes rows on asks every few seconds how its next node is: one that has not for so long is gone. */
const GONE_MS = 60_000;

/** The nodes that pass rows on to this one, by the id that each says of itself, and when each was last heard of. */
export class Callers {
  readonly #clock: () => number;
  readonly #heard = new Map<string, number>();

  /** `clock`: milliseconds from anywhere. */
  constructor(clock: () => number = () => performance.now()) {
    this.#clock = clock;
  }

  /** Any request may say that it is a node's. */
  hear(headers: Headers): void {
    const node = callerOf(headers);
    if (node !== undefined) this.#heard.set(node, this.#clock());
  }

  isGone(node: string): boolean {
    return this.#clock() - (this.#heard.get(node) ?? -Infinity) >= GONE_MS;
  }

  /** Forgets those that are gone. */
  tidy(): void {
    for (const node of this.#heard.keys()) if (this.isGone(node)) this.#heard.delete(node);
  }
}

/** The id of the node that a request is from; undefined where it is from none. */
export function callerOf(headers: Headers): string | undefined {
  const node = headers.get(HEADERS.node);
  return node !== null && /^[\w.-]{1,64}$/.test(node) ? node : undefined;
}
