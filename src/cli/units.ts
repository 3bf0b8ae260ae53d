import { UserError } from "../base/errors.ts";

const BYTES: Record<string, number> = {
  b: 1,
  ...powers(1000, ["kb", "mb", "gb", "tb", "pb"]),
  ...powers(1024, ["kib", "mib", "gib", "tib", "pib"]),
};
const UNITS = "kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (of 1024)";
const HINT = `give a number of bytes, or one with its unit, as 8GiB or 500MB; units are ${UNITS}`;

function powers(base: number, units: readonly string[]): Record<string, number> {
  return Object.fromEntries(units.map((unit, i) => [unit, base ** (i + 1)]));
}

/** `24GiB`, `512 MiB`, `1.5GB`, `4096`: bytes. `what`: for the message, as "--memory-limit". */
export function byteSize(what: string, text: string): number {
  const [, number, unit] = /^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$/i.exec(text) ?? [];
  if (number === undefined) throw new UserError("bad_usage", `${what} ${text || '""'} is not a size`, HINT);
  const factor = BYTES[unit!.toLowerCase() || "b"];
  if (factor === undefined) {
    const problem = `${what} ${text} is not a size: ${unit} is none of its units`;
    const known = ["B", "iB"].map((end) => unit + end).filter((name) => Object.hasOwn(BYTES, name.toLowerCase()));
    const meant = known.length > 0 ? `is ${known.map((name) => `${number}${name}`).join(" or ")} meant? ` : "";
    throw new UserError("bad_usage", problem, `${meant}${HINT}`);
  }
  const bytes = Math.round(Number(number) * factor);
  if (bytes > Number.MAX_SAFE_INTEGER) {
    throw new UserError("bad_usage", `${what} ${text} is not a size: the largest is just below 8PiB`, HINT);
  }
  const isPart = unit === "" && number.includes("."); // of a byte: a unit was forgotten
  if (bytes > 0 && !isPart) return bytes;
  throw new UserError("bad_usage", `${what} ${text} is not a size`, HINT);
}

/** `900GB/s`, `2.5 Gbit/s`: bytes per second. */
export function byteRate(what: string, text: string): number {
  const [, number, unit] = /^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\/s\s*$/i.exec(text) ?? [];
  const [, prefix] = /^([kmgt]?)bit$/i.exec(unit ?? "") ?? [];
  const factor = prefix === undefined ? BYTES[unit?.toLowerCase() ?? ""] : (BYTES[`${prefix.toLowerCase()}b`] ?? 1) / 8;
  const bytes = Number(number) * (factor ?? Number.NaN);
  if (bytes > 0 && Number.isFinite(bytes)) return bytes;
  throw new UserError(
    "bad_usage",
    `${what} ${text || '""'} is not a speed`,
    `give it as 900GB/s or 1Gbit/s; units are ${UNITS}, or bit, kbit, Mbit, Gbit, Tbit, each /s`,
  );
}
