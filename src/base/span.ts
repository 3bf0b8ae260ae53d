/** Transformer layers `[start, end)` out of `total`. The head starts at 0; the tail ends at `total`. */
export interface Span {
  readonly start: number;
  readonly end: number;
  readonly total: number;
}

export const isHead = (span: Span): boolean => span.start === 0;
export const isTail = (span: Span): boolean => span.end === span.total;

/** `6-12`, as in the header `X-Meshnet-Layers` and in error replies. */
export const formatSpan = (span: Span): string => `${span.start}-${span.end}`;
