const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"] as const;

/** `9.1 GiB`: a number of bytes for people. */
export function formatBytes(bytes: number): string {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${UNITS[unit]}`;
}

/** `256MiB`, `1.5GiB`, `500MB`, else bytes: a number of bytes as people give it to a flag, with nothing lost. */
export function sizeFlag(bytes: number): string {
  for (let power = UNITS.length - 1; power > 0; power--) {
    for (const [base, unit] of [
      [1024, UNITS[power]!],
      [1000, UNITS[power]!.replace("i", "")],
    ] as const) {
      const value = Number((bytes / base ** power).toFixed(2));
      if (value >= 1 && Math.round(value * base ** power) === bytes) return `${value}${unit}`;
    }
  }
  return `${bytes}`;
}

/** The smallest multiple of `step` that is not below `value`. */
export const roundUp = (value: number, step: number): number => Math.ceil(value / step) * step;

export const ceilDiv = (value: number, divisor: number): number => Math.ceil(value / divisor);

export const sum = (values: Iterable<number>): number => {
  let total = 0;
  for (const value of values) total += value;
  return total;
};

/** The bytes under any typed array, without a copy. */
export const bytesOf = (view: ArrayBufferView): Uint8Array =>
  new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
