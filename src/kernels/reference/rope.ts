import type { Matrix } from "./matrix.ts";
import type { HeadColumns } from "./rms-norm.ts";

/** Turns the pairs of some heads of each row, (i, i + pairs) or, interleaved, (2i, 2i + 1); `angles[position]` holds the cosines, then the sines. */
export const rope = (
  x: Matrix,
  positions: readonly number[],
  angles: Matrix,
  { first, heads, headStride }: Omit<HeadColumns, "headDim">,
  interleaved = false,
): number[][] =>
  x.map((values, token) => {
    const row = Array.from(values);
    const turn = angles[positions[token]!]!;
    const pairs = turn.length / 2;
    for (let head = 0; head < heads; head++) {
      for (let pair = 0; pair < pairs; pair++) {
        const at = first + head * headStride + (interleaved ? 2 * pair : pair);
        const other = at + (interleaved ? 1 : pairs);
        const [a, b, cosine, sine] = [row[at]!, row[other]!, turn[pair]!, turn[pairs + pair]!];
        row[at] = a * cosine - b * sine;
        row[other] = b * cosine + a * sine;
      }
    }
    return row;
  });
