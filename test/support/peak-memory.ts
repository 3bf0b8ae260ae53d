import { readFileSync } from "node:fs";

/** The highest resident set of this process, in bytes. (`resourceUsage` counts that of the parent at the fork as well.) */
export function peakMemory(): number {
  if (process.platform !== "linux") return process.resourceUsage().maxRSS * 1024;
  return Number(/VmHWM:\s+(\d+) kB/.exec(readFileSync("/proc/self/status", "utf8"))![1]) * 1024;
}
