import { describe, expect, test } from "bun:test";
import { megabytes, showDownload, StatusLine } from "../../src/cli/progress.ts";
import { createLogger } from "../../src/base/log.ts";

const SIZE = { modelId: "openai-community/gpt2", fetchBytes: 113_405_952, checkpointBytes: 548_105_171 };
const START = new Date("2026-11-29T12:00:00Z");
const PIECE = SIZE.fetchBytes / 64;

/** A download of 8 seconds in 64 pieces, as it is shown. */
function shown(format: "text" | "json", columns?: number): string {
  let text = "";
  let clock = 0;
  const write = (more: string) => void (text += more);
  const line = new StatusLine(write, () => columns ?? 80);
  const log = createLogger({ level: "info", format, write: (row) => line.print(row), now: () => START });
  const progress = showDownload({ log, format, line: columns ? line : undefined, now: () => clock });
  progress.begin(SIZE);
  for (let piece = 1; piece <= 64; piece++) {
    clock = piece * 125;
    progress.advance(PIECE);
    if (piece === 32) log.warn("download interrupted");
  }
  progress.end();
  return text;
}

describe("on a terminal", () => {
  const text = shown("text", 100);
  const states = text.split("\r\u001b[K");

  test("a download is one line with bytes, rate and time left", () => {
    expect(states).toContain("fetching openai-community/gpt2: 57 MB of 113 MB (50 %), 14 MB/s, 4 s left");
    expect(text.split("\n")).toHaveLength(3); // the interruption, the closing line, and nothing
  });

  test("a log line goes above it, and it is drawn again", () => {
    expect(text).toContain(
      "\r\u001b[K12:00:00 warn  download interrupted\nfetching openai-community/gpt2: 57 MB of 113 MB",
    );
  });

  test("the closing line stands alone", () => {
    expect(states.at(-1)).toBe('12:00:00 info  fetched 113 MB of a 548 MB checkpoint seconds=8.0 rate="14 MB/s"\n');
  });

  test("it is cut to the terminal's width, or it could not be taken back", () => {
    for (const state of shown("text", 40).split("\r\u001b[K").slice(1, -1)) {
      expect(state.split("\n").at(-1)!.length).toBeLessThan(40);
    }
  });
});

test("elsewhere a download is a log line every few seconds", () => {
  const lines = shown("text").trimEnd().split("\n");
  expect(lines.filter((line) => line.includes("fetching"))).toEqual([
    '12:00:00 info  fetching done="0 MB" of="113 MB"',
    '12:00:00 info  fetching done="43 MB" of="113 MB" rate="14 MB/s" left="5 s"',
    '12:00:00 info  fetching done="85 MB" of="113 MB" rate="14 MB/s" left="2 s"',
  ]);
  expect(lines.at(-1)).toContain("fetched 113 MB of a 548 MB checkpoint");
});

test("for programs a download is events with numbers", () => {
  const events = shown("json")
    .trimEnd()
    .split("\n")
    .map((line) => JSON.parse(line));
  expect(events.find(({ event, doneBytes }) => event === "download" && doneBytes > 0)).toMatchObject({
    ...SIZE,
    doneBytes: 24 * PIECE,
    bytesPerSecond: PIECE * 8,
    etaSeconds: 5,
  });
  expect(events.at(-1)).toMatchObject({ event: "downloaded", ...SIZE, seconds: 8 });
});

test.each([
  [0, "0 MB"],
  [1_234_567, "1.2 MB"],
  [548_105_171, "548 MB"],
  [999_600_000, "1.0 GB"],
  [140_000_000_000, "140 GB"],
])("%d bytes are %s", (bytes, text) => {
  expect(megabytes(bytes)).toBe(text);
});
