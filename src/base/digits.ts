/** A measured number in so many digits. A large one has all those before the point instead of an exponent: 163, not 1.6e+2. */
export function inDigits(value: number, digits: number): string {
  const text = value.toPrecision(digits);
  return text.includes("e+") ? value.toFixed(0) : text;
}
