import { closeSync, fstatSync, readSync, writeSync } from "node:fs";
import { libc, memfdCreate } from "../base/libc.ts";
import type { Logger } from "../base/log.ts";

/**
 * Runs `work` while what native code writes to stderr is held back, then logs the lines that are known to come from
 * Dawn and the drivers at debug level and writes all others to stderr after all. Dawn has no switch for its warnings
 * (two per adapter request), and no logger of ours sees them.
 *
 * Elsewhere than on Linux, and inside another capture, `work` just runs.
 */
export async function captureStderr<T>(log: Logger, work: () => Promise<T>): Promise<T> {
  if (process.platform !== "linux" || capturing) return work();
  const held = memfdCreate("stderr");
  const stderr = libc().dup(STDERR);
  if (stderr < 0) {
    closeSync(held); // stderr is closed already: nothing to keep clean
    return work();
  }
  capturing = true;
  libc().dup2(held, STDERR);
  try {
    return await work();
  } finally {
    libc().dup2(stderr, STDERR);
    capturing = false;
    closeSync(stderr);
    release(held, log);
  }
}

const STDERR = 2;
let capturing = false;

function release(held: number, log: Logger): void {
  const bytes = Buffer.alloc(fstatSync(held).size);
  readSync(held, bytes, 0, bytes.length, 0);
  closeSync(held);
  for (const line of bytes.toString().split("\n")) {
    if (NATIVE_LINE.test(line)) log.debug("native_warning", { text: line.trim() });
    else if (line !== "") writeSync(STDERR, `${line}\n`);
  }
}

/** Dawn's `Warning: …` with its `    at file:line`, the Vulkan loader's and Mesa's lines. */
const NATIVE_LINE = /^(Warning: | {4}at .*\.cpp:|ERROR: \[Loader|WARNING: \[Loader|MESA|error: XDG_RUNTIME_DIR)/;
