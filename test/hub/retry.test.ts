import { expect, test } from "bun:test";
import { askedPauseMs, backoffMs } from "../../src/hub/retry.ts";

const NOW = Date.parse("Sun, 29 Nov 2026 12:00:00 GMT");

test.each([
  [{ "Retry-After": "7" }, 7000],
  [{ "Retry-After": "Sun, 29 Nov 2026 12:00:30 GMT" }, 30_000],
  [{ "Retry-After": "Sun, 29 Nov 2026 11:00:00 GMT" }, 0], // already over
  [{ "Retry-After": "soon" }, undefined],
  [{ RateLimit: '"resolvers";r=0;t=123' }, 123_000],
  [{ RateLimit: '"api";r=12;t=5, "resolvers"; r=0; t=55' }, 55_000],
  [{ RateLimit: '"resolvers";r=100;t=123' }, undefined], // requests are left: something else is busy
  [{ RateLimit: '"resolvers";r=0;t=123', "Retry-After": "2" }, 2000],
  [{}, undefined],
])("an answer with %j asks to wait %p ms", (headers, pauseMs) => {
  expect(askedPauseMs(new Headers(headers as Record<string, string>), NOW)).toBe(pauseMs);
});

test("the pause doubles with each failure, up to half a minute, and is never the same for all", () => {
  for (const [attempt, most] of [
    [1, 500],
    [2, 1000],
    [5, 8000],
    [20, 30_000],
  ] as const) {
    const pauses = Array.from({ length: 50 }, () => backoffMs(attempt, 500));
    for (const pause of pauses) expect(pause).toBeWithin(most / 2, most + 1);
    expect(new Set(pauses).size).toBeGreaterThan(1);
  }
});
