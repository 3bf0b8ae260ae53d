import { hasLibc, libc } from "../base/libc.ts";

/**
 * Keeps Dawn's waiting from taking a core.
 *
 * While any GPU promise is pending, dawn.node asks for its events in a `setImmediate` loop: about 100,000 polls a
 * second, one whole core, and on a software adapter that is a core the shaders want. It looks the function up on
 * `globalThis` at every poll, so a replacement is seen; everybody else's calls go straight to the real one.
 *
 * The pause before a poll is a fixed fraction of the time already waited. So a short dispatch is answered at once, a
 * long one about 1/32 late at most, and neither needs to be known in advance. On lavapipe with two cores a dispatch of
 * 52 ms came down to 23-38 ms, and the waiting thread from 27-41 % of a core to 7-9 %; 0.1 ms round trips stayed.
 */
export function easePolling(globals: { GPUQueue?: unknown }): void {
  const { setImmediate, setTimeout } = globalThis;
  let waitingSince = 0;
  let inPoll = false;

  const poll = (callback: () => void) => () => {
    inPoll = true;
    try {
      callback();
    } finally {
      inPoll = false;
    }
  };

  const easedSetImmediate = (callback: (...args: unknown[]) => void, ...args: unknown[]) => {
    if (args.length > 0 || !isDawnsPoll(callback)) return setImmediate(callback, ...args);
    const now = performance.now();
    if (!inPoll) waitingSince = now; // asked for by a new promise, not by the poll before it
    const pauseMs = (now - waitingSince) / PAUSE_DIVISOR;
    if (pauseMs >= TIMER_MS) return setTimeout(poll(callback), Math.min(pauseMs, LONGEST_PAUSE_MS));
    if (pauseMs >= SHORTEST_PAUSE_MS && hasLibc) libc().usleep(pauseMs * 1000);
    return setImmediate(poll(callback));
  };
  const properties = Object.getOwnPropertyDescriptors(setImmediate); // among them the promise version
  globalThis.setImmediate = Object.defineProperties(easedSetImmediate, properties) as typeof setImmediate;

  // With several submissions in flight one series of polls serves them all; the newest may be a short one.
  const queue = (globals.GPUQueue as { prototype: GPUQueue }).prototype;
  const submit = queue.submit;
  queue.submit = function (commandBuffers) {
    waitingSince = performance.now();
    return submit.call(this, commandBuffers);
  };
}

const PAUSE_DIVISOR = 32;
/** A sleep takes 58 us more than was asked for (Linux's timer slack), so a shorter pause is spent polling. */
const SHORTEST_PAUSE_MS = 0.03;
/** Up to here the thread sleeps; from here on the event loop's timer, 0.13 ms late, lets it serve requests meanwhile. */
const TIMER_MS = 1;
const LONGEST_PAUSE_MS = 4;

/**
 * Dawn hands over a fresh native function without name or parameters. A promise's resolve function is native too, but
 * takes one; an arrow function has no `prototype`, which spares most callers the look at their text.
 */
export function isDawnsPoll(callback: (...args: never[]) => void): boolean {
  return (
    callback.length === 0 &&
    callback.name === "" &&
    Object.hasOwn(callback, "prototype") &&
    Function.prototype.toString.call(callback).endsWith("{ [native code] }")
  );
}
