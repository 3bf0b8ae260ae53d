import { UserError } from "../../base/errors.ts";
import { RemoteError } from "../../protocol/error-reply.ts";
import { unlessAborted } from "../abort.ts";

/** Nodes further on hear of a text's end a moment after this one. */
const NEWS_MS = 1_000;
const RETRY_MS = 50;

/**
 * Where texts wait for room in the chain. Sessions are refused where there is none; a text of this door waits instead, in the
 * order in which they came, as long as others of this door run: each of those gives its room back. Where none runs, somebody
 * else has the room, and who knows for how long: then the refusal stands.
 */
export class WaitingRoom {
  readonly #most: number;
  /** In the order of their tickets. */
  readonly #waiting: { readonly ticket: number; readonly call: () => void }[] = [];
  #tickets = 0;
  #running = 0;
  #lastLeft = -Infinity;

  /** `most`: texts that may wait at one time. */
  constructor(most: number) {
    this.#most = most;
  }

  /**
   * Does `begin`, when it has room; whoever got its result calls `leave` at the text's end. Throws what `begin` throws, `no_room`
   * where too many wait, the signal's reason.
   */
  async enter<T>(begin: () => Promise<T>, signal: AbortSignal): Promise<T> {
    const ticket = ++this.#tickets;
    if (this.#waiting.length > 0) await this.#turn(ticket, signal);
    for (;;) {
      this.#running++;
      try {
        const result = await begin();
        this.#wake(); // there may be room for another one
        return result;
      } catch (error) {
        this.#running--;
        const isJustFree = performance.now() - this.#lastLeft < NEWS_MS;
        if (!isNoRoom(error) || (this.#running === 0 && !isJustFree)) {
          this.#wake();
          throw error;
        }
      }
      if (this.#running > 0) await this.#turn(ticket, signal);
      else await this.#pause(signal);
    }
  }

  leave(): void {
    this.#running--;
    this.#lastLeft = performance.now();
    this.#wake();
  }

  async #turn(ticket: number, signal: AbortSignal): Promise<void> {
    if (this.#waiting.length >= this.#most) {
      throw new UserError("no_room", `${this.#most} texts wait for room already`, "try again in a moment");
    }
    const turn = Promise.withResolvers<void>();
    const waiter = { ticket, call: turn.resolve };
    const later = this.#waiting.findIndex((other) => other.ticket > ticket);
    this.#waiting.splice(later < 0 ? this.#waiting.length : later, 0, waiter);
    try {
      await unlessAborted(turn.promise, signal);
    } catch (error) {
      const at = this.#waiting.indexOf(waiter);
      if (at >= 0) this.#waiting.splice(at, 1);
      else this.#wake(); // it had just been called: the turn is the next one's
      throw error;
    }
  }

  async #pause(signal: AbortSignal): Promise<void> {
    try {
      await unlessAborted(Bun.sleep(RETRY_MS), signal);
    } catch (error) {
      this.#wake(); // those that wait would have waited for this one
      throw error;
    }
  }

  #wake(): void {
    this.#waiting.shift()?.call();
  }
}

function isNoRoom(error: unknown): boolean {
  return error instanceof UserError
    ? error.code === "no_room"
    : error instanceof RemoteError && error.body.code === "no_room";
}
