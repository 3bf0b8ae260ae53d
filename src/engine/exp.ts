/**
 * e^x for x ≤ 0, within one unit in the last place of float64. Of IEEE additions and multiplications alone, in a written
 * order: `Math.exp` is allowed to differ between machines, and then a replay elsewhere could draw another token.
 */
export function exp(x: number): number {
  if (x < -700) return 0; // below 1e-304
  const k = Math.floor(x * LOG2_E + 0.5);
  const r = x - k * LN2_HIGH - k * LN2_LOW; // |r| ≤ ln 2 / 2
  let sum = r * (1 / 6227020800) + 1 / 479001600; // the Taylor series, from 1/13! down to 1/0!
  sum = sum * r + 1 / 39916800;
  sum = sum * r + 1 / 3628800;
  sum = sum * r + 1 / 362880;
  sum = sum * r + 1 / 40320;
  sum = sum * r + 1 / 5040;
  sum = sum * r + 1 / 720;
  sum = sum * r + 1 / 120;
  sum = sum * r + 1 / 24;
  sum = sum * r + 1 / 6;
  sum = sum * r + 1 / 2;
  sum = sum * r + 1;
  sum = sum * r + 1;
  return sum * POWERS[-k]!;
}

const LOG2_E = 1.4426950408889634;
/** ln 2 in two parts, the first with 32 zero bits at its end, so that k times it is exact (fdlibm, `e_exp.c`). */
const LN2_HIGH = 6.9314718036912381649e-1;
const LN2_LOW = 1.90821492927058770002e-10;

/** 2^-i */
const POWERS = new Float64Array(1024);
for (let i = 0, power = 1; i < POWERS.length; i++, power /= 2) POWERS[i] = power;
