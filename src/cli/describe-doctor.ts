import type { Check, CheckStatus, DoctorReport } from "../server/doctor/index.ts";

const COLOURS: Record<CheckStatus, string> = { ok: "\x1b[32m", warn: "\x1b[33m", fail: "\x1b[31m", skip: "\x1b[2m" };
const RESET = "\x1b[0m";

/** Where the id is not the name for people. */
const NAMES: Partial<Record<Check["id"], string>> = {
  "c-library": "C library",
  "temporary-folder": "temporary folder",
  "gpu-runtime": "GPU runtime",
  "vulkan-loader": "Vulkan loader",
  hub: "Hub",
};

const STATUS_WIDTH = 6;
const NAME_WIDTH = 18;
const INDENT = " ".repeat(STATUS_WIDTH + NAME_WIDTH);

/** A line for the check; below it what else there is to say, and what to do. With colours, which the caller may strip. */
export function describeCheck({ id, status, found, details, remedy }: Check): string {
  const head = `${COLOURS[status]}${status.padEnd(STATUS_WIDTH)}${RESET}${(NAMES[id] ?? id).padEnd(NAME_WIDTH)}${found}`;
  const rest = [...details, ...(remedy === null ? [] : [`→ ${remedy}`])];
  return [head, ...rest.map((line) => `${INDENT}${line}`)].join("\n");
}

export function describeVerdict({ checks }: DoctorReport): string {
  const count = (status: CheckStatus) => checks.filter((check) => check.status === status).length;
  const [failed, warned] = [count("fail"), count("warn")];
  const verdict = failed > 0 ? "something is wrong" : warned > 0 ? "it works, and could work better" : "all is well";
  return `\n${verdict}: ${count("ok")} ok, ${warned} ${warned === 1 ? "warning" : "warnings"}, ${failed} failed, ${count("skip")} skipped`;
}
