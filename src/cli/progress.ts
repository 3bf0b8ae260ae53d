import type { Logger } from "../base/log.ts";
import type { DownloadProgress, DownloadSize } from "../hub/progress.ts";

/** The last line of a terminal, drawn anew in its place; other lines go above it. */
export class StatusLine {
  readonly #write: (text: string) => void;
  readonly #columns: () => number;
  #shown = "";

  constructor(write: (text: string) => void, columns: () => number) {
    this.#write = write;
    this.#columns = columns;
  }

  show(text: string): void {
    this.#shown = text.slice(0, this.#columns() - 1); // a line that wraps could not be taken back
    this.#write(`${CLEAR}${this.#shown}`);
  }

  /** An ordinary line. */
  print(line: string): void {
    this.#write(this.#shown ? `${CLEAR}${line}\n${this.#shown}` : `${line}\n`);
  }

  clear(): void {
    if (this.#shown) this.#write(CLEAR);
    this.#shown = "";
  }
}

const CLEAR = "\r\u001b[K";

export interface ProgressOptions {
  readonly log: Logger;
  /** Where stderr is a terminal that people look at. */
  readonly line?: StatusLine;
  readonly format: "text" | "json";
  /** Milliseconds. */
  readonly now?: () => number;
}

const REDRAW_MS = 100;
const LOG_MS = 3_000;

/** Shows a download: as a line that is redrawn, as a log line every few seconds, or as events for a program. */
export function showDownload({ log, line, format, now = () => performance.now() }: ProgressOptions): DownloadProgress {
  let size: DownloadSize = { modelId: "", fetchBytes: 0, checkpointBytes: 0 };
  let meter = new Meter(now());
  let shownAt = 0;

  const show = () => {
    const { doneBytes } = meter;
    const bytesPerSecond = meter.rate(now());
    const etaSeconds = bytesPerSecond > 0 ? (size.fetchBytes - doneBytes) / bytesPerSecond : undefined;
    if (format === "json") {
      const { modelId, fetchBytes, checkpointBytes } = size;
      const rounded = { bytesPerSecond: Math.round(bytesPerSecond), etaSeconds: etaSeconds && Math.ceil(etaSeconds) };
      return log.info("download", { modelId, doneBytes, fetchBytes, checkpointBytes, ...rounded });
    }
    const [done, of] = [megabytes(doneBytes), megabytes(size.fetchBytes)];
    const rate = bytesPerSecond > 0 ? `${megabytes(bytesPerSecond)}/s` : undefined;
    const left = etaSeconds === undefined ? undefined : duration(etaSeconds);
    if (!line) return log.info("fetching", { done, of, rate, left });
    const percent = Math.floor((100 * doneBytes) / size.fetchBytes);
    line.show(`fetching ${size.modelId}: ${done} of ${of} (${percent} %)${rate ? `, ${rate}, ${left} left` : ""}`);
  };

  return {
    begin(download) {
      size = download;
      meter = new Meter(now());
      shownAt = now();
      show();
    },
    advance(bytes) {
      meter.add(bytes, now());
      if (now() - shownAt < (line && format === "text" ? REDRAW_MS : LOG_MS)) return;
      shownAt = now();
      show();
    },
    end() {
      line?.clear();
      const { modelId, fetchBytes, checkpointBytes } = size;
      const seconds = meter.seconds(now());
      if (format === "json")
        return log.info("downloaded", { modelId, fetchBytes, checkpointBytes, seconds: Number(seconds.toFixed(3)) });
      const what = `fetched ${megabytes(fetchBytes)} of a ${megabytes(checkpointBytes)} checkpoint`;
      log.info(what, { seconds: seconds.toFixed(1), rate: `${megabytes(fetchBytes / Math.max(seconds, 0.001))}/s` });
    },
    fail: () => line?.clear(),
  };
}

/** How fast bytes come: over the last seconds, so that what is left is told by how it goes now. */
class Meter {
  doneBytes = 0;
  readonly #began: number;
  #samples: { at: number; doneBytes: number }[];

  constructor(now: number) {
    this.#began = now;
    this.#samples = [{ at: now, doneBytes: 0 }];
  }

  add(bytes: number, now: number): void {
    this.doneBytes += bytes;
    if (now - this.#samples.at(-1)!.at < SAMPLE_MS) return;
    this.#samples.push({ at: now, doneBytes: this.doneBytes });
    if (this.#samples.length > SAMPLES) this.#samples.shift();
  }

  rate(now: number): number {
    const { at, doneBytes } = this.#samples[0]!;
    return now > at ? ((this.doneBytes - doneBytes) / (now - at)) * 1000 : 0;
  }

  seconds(now: number): number {
    return (now - this.#began) / 1000;
  }
}

const SAMPLE_MS = 250;
const SAMPLES = 40;

/** `113 MB`, in millions as the Hub's own pages say it. */
export function megabytes(bytes: number): string {
  if (bytes === 0) return "0 MB";
  const [value, unit] = bytes < 999.5e6 ? [bytes / 1e6, "MB"] : [bytes / 1e9, "GB"];
  return `${value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
}

function duration(seconds: number): string {
  const whole = Math.ceil(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
