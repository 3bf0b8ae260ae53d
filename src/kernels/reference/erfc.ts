/** 1 - erf(x), to 12 digits and more: the series where it converges fast, the continued fraction beyond. */
export function erfc(x: number): number {
  if (x < 0) return 2 - erfc(-x);
  return x < 2 ? 1 - erfSeries(x) : erfcFraction(x);
}

/** erf x = 2/√π e^(-x²) Σ 2ⁿ x^(2n+1) / (1·3·5···(2n+1)), whose terms are all positive. */
function erfSeries(x: number): number {
  let term = x;
  let sum = 0;
  for (let n = 0; n < 60; n++) {
    sum += term;
    term *= (2 * x * x) / (2 * n + 3);
  }
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

/** erfc x = e^(-x²)/√π · 1/(x + ½/(x + 1/(x + 3⁄2/(x + 2/(x + …))))), from its 200th denominator outwards. */
function erfcFraction(x: number): number {
  let denominator = x;
  for (let n = 200; n > 0; n--) denominator = x + n / 2 / denominator;
  return Math.exp(-x * x) / Math.sqrt(Math.PI) / denominator;
}
