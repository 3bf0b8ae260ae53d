import { UserError } from "../base/errors.ts";

const BYTES: Record<string, number> = {
  b: 1,
  ...powers(1000, ["kb", "mb", "gb", "tb"]),
  ...powers(1024, ["kib", "mib", "gib", "tib"]),
};

function powers(base: number, units: readonly string[]): Record<string, number> {
  return Object.fromEntries(units.map((unit, i) => [unit, base ** (i + 1)]));
}

/** `24GiB`, `512 MiB`, `1.5GB`, `4096`: bytes. `what`: for the message, as "--memory-limit". */
export function byteSize(what: string, text: string): number {
  const [, number, unit] = /^\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*$/i.exec(text) ?? [];
  const bytes = Math.round(Number(number) * (BYTES[unit?.toLowerCase() ?? "b"] ?? NaN));
  const isPart = unit === undefined && number?.includes("."); // of a byte: a unit was forgotten
  if (bytes > 0 && Number.isSafeInteger(bytes) && !isPart) return bytes;
  throw new UserError(
    "bad_usage",
    `${what} ${text} is not a size`,
    "give a number of bytes, or one with its unit, as 8GiB, 512MiB or 500MB",
  );
}

/** `900GB/s`, `2.5 Gbit/s`: bytes per second. */
export function byteRate(what: string, text: string): number {
  const [, number, prefix, unit] = /^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)bit\/s()\s*$/i.exec(text) ?? [];
  if (unit !== undefined) {
    const bytes = (Number(number) * (BYTES[`${prefix!.toLowerCase()}b`] ?? 1)) / 8;
    if (bytes > 0) return bytes;
  } else if (/b\/s\s*$/i.test(text)) {
    return byteSize(what, text.replace(/\/s\s*$/i, ""));
  }
  throw new UserError("bad_usage", `${what} ${text} is not a speed`, "give it as 900GB/s or 1Gbit/s");
}
