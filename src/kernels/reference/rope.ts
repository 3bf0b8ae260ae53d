import type { Matrix } from "./matrix.ts";
import type { HeadColumns } from "./rms-norm.ts";

/** Turns the pairs (i, i + pairs) of some heads of each row; `angles[position]` holds the cosines, then the sines. */
export const rope = (
  x: Matrix,
  positions: readonly number[],
  angles: Matrix,
  { first, heads, headStride }: Omit<HeadColumns, "headDim">,
): number[][] =>
  x.map((values, token) => {
    const row = Array.from(values);
    const turn = angles[positions[token]!]!;
    const pairs = turn.length / 2;
    for (let head = 0; head < heads; head++) {
      for (let pair = 0; pair < pairs; pair++) {
        const at = first + head * headStride + pair;
        const [a, b, cosine, sine] = [row[at]!, row[at + pairs]!, turn[pair]!, turn[pairs + pair]!];
        row[at] = a * cosine - b * sine;
        row[at + pairs] = b * cosine + a * sine;
      }
    }
    return row;
  });
