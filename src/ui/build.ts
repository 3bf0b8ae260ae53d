// Macros: they run while the program is built (or, from source, when `page.ts` is loaded), and their results stand in
// the program instead of the calls.
import { readFileSync } from "node:fs";
import { join } from "node:path";

/** What a file of this folder holds. */
export function contents(name: string): string {
  return readFileSync(join(import.meta.dir, name), "utf8");
}

/** A program for browsers, with all that it imports, in one file. */
export function bundle(entry: string): string {
  const command = [process.execPath, "build", "--target=browser", "--minify", join(import.meta.dir, entry)];
  const { exitCode, stdout, stderr } = Bun.spawnSync(command); // a bundler's macro cannot call the bundler itself
  if (exitCode !== 0) throw new Error(`${entry} could not be bundled:\n${stderr}`);
  return String(stdout);
}
