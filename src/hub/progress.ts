/** Told by a download as it goes; who is told decides what a person sees. */
export interface DownloadProgress {
  /** Once, before the first byte and only where there is something to fetch. */
  begin(download: DownloadSize): void;
  /** So many bytes more are here. */
  advance(bytes: number): void;
  /** Everything is here. Not called when the download fails. */
  end(): void;
  /** In place of `end`: it failed. */
  fail(): void;
}

export interface DownloadSize {
  readonly modelId: string;
  readonly fetchBytes: number;
  /** Of all files of weights that the model has. */
  readonly checkpointBytes: number;
}

export const silentProgress: DownloadProgress = { begin() {}, advance() {}, end() {}, fail() {} };
