import { roundBf16 } from "./bf16.ts";
import { type Matrix, matrixOf } from "./matrix.ts";

/** x Wᵀ + bias. x: [rows, columns]; weight: [outputs, columns] */
export const linear = (x: Matrix, weight: Matrix, bias?: ArrayLike<number>): number[][] =>
  matrixOf(x.length, weight.length, (row, output) => {
    let sum = 0;
    for (let k = 0; k < x[row]!.length; k++) sum += x[row]![k]! * weight[output]![k]!;
    return sum + (bias?.[output] ?? 0);
  });

/**
 * The same in float32, in the one order of addition that all kernels keep: blocks of 32 columns, each from its first
 * column to its last, then the blocks from first to last. To the last bit as long as the products are exact in float32,
 * which those of bfloat16 values are: whether a device fuses product and sum then makes no difference.
 */
export const linearInOrder = (x: Matrix, weight: Matrix, bias?: ArrayLike<number>, round = false): number[][] =>
  matrixOf(x.length, weight.length, (row, output) => {
    let total = 0;
    for (let first = 0; first < x[row]!.length; first += 32) {
      let sum = 0;
      for (let k = first; k < Math.min(first + 32, x[row]!.length); k++) {
        sum = Math.fround(sum + x[row]![k]! * weight[output]![k]!);
      }
      total = Math.fround(total + sum);
    }
    if (bias) total = Math.fround(total + bias[output]!);
    return round ? roundBf16(total) : total;
  });
