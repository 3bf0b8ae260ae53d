/** Bytes `[begin, end)` of a file. */
export interface ByteRange {
  readonly begin: number;
  readonly end: number;
}

/** The same bytes as few ranges, sorted: what overlaps, touches or lies less than `gapBytes` apart becomes one. */
export function joined(ranges: Iterable<ByteRange>, gapBytes = 0): ByteRange[] {
  const result: { begin: number; end: number }[] = [];
  for (const { begin, end } of [...ranges].filter(isNotEmpty).sort((a, b) => a.begin - b.begin)) {
    const last = result.at(-1);
    if (last && (begin <= last.end || begin - last.end < gapBytes)) last.end = Math.max(last.end, end);
    else result.push({ begin, end });
  }
  return result;
}

/** The bytes of `wanted` that are not in `have`; both as `joined` gives them. */
export function without(wanted: readonly ByteRange[], have: readonly ByteRange[]): ByteRange[] {
  const result: ByteRange[] = [];
  let next = 0;
  for (let { begin, end } of wanted) {
    while (next < have.length && have[next]!.end <= begin) next++;
    for (let at = next; at < have.length && have[at]!.begin < end; at++) {
      result.push({ begin, end: have[at]!.begin });
      begin = have[at]!.end;
    }
    result.push({ begin, end });
  }
  return result.filter(isNotEmpty);
}

/** The same bytes in ranges of at most `mostBytes`. */
export function split(ranges: readonly ByteRange[], mostBytes: number): ByteRange[] {
  return ranges.flatMap(({ begin, end }) =>
    Array.from({ length: Math.ceil((end - begin) / mostBytes) }, (_, i) => ({
      begin: begin + i * mostBytes,
      end: Math.min(end, begin + (i + 1) * mostBytes),
    })),
  );
}

/** How many bytes they are in all. */
export const byteCount = (ranges: Iterable<ByteRange>): number => {
  let total = 0;
  for (const { begin, end } of ranges) total += end - begin;
  return total;
};

const isNotEmpty = ({ begin, end }: ByteRange): boolean => end > begin;
