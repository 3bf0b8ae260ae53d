// `npm test`: format, types, lint, build, then every test; `--long` adds the long ones. Ends with one line of totals.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** A test that hangs is ended with the whole run. */
const TEST_MINUTES = { short: 35, long: 80 };

const CHECKS = [
  ["format", "bun", "fmt", "--check"],
  ["types", "bun", "check"],
  ["types of the page", "bun", "check", "-p", "src/ui/browser"],
  ["lint", "oxlint", "--deny-warnings"],
  ["build", "bun", ".ci/build.ts"],
] as const;

const long = process.argv.includes("--long");
const totals = { passed: 0, failed: 0, skipped: 0 };

for (const [name, ...command] of CHECKS) {
  console.log(`\n${name}: ${command.join(" ")}`);
  const passed = (await run(command)) === 0;
  totals[passed ? "passed" : "failed"]++;
}
await runTests();
console.log(`\n${totals.passed} passed, ${totals.failed} failed, ${totals.skipped} skipped`);
process.exit(totals.failed === 0 ? 0 : 1);

async function runTests(): Promise<void> {
  const folder = mkdtempSync(join(tmpdir(), "meshnet-report-"));
  const report = join(folder, "tests.xml");
  const minutes = long ? TEST_MINUTES.long : TEST_MINUTES.short;
  const command = ["bun", "test", "--reporter=junit", `--reporter-outfile=${report}`];
  console.log(`\ntests: ${command.slice(0, 2).join(" ")}`);
  const code = await run(command, { ...process.env, LONG_TESTS: long ? "1" : "" }, minutes * 60_000);
  try {
    const [, attributes = ""] = /<testsuites([^>]*)>/.exec(readFileSync(report, "utf8")) ?? [];
    const count = (name: string) => Number(new RegExp(` ${name}="(\\d+)"`).exec(attributes)?.[1] ?? 0);
    totals.failed += count("failures");
    totals.skipped += count("skipped");
    totals.passed += count("tests") - count("failures") - count("skipped");
  } catch {
    console.error("the tests left no report: they crashed, or took longer than they may");
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
  // A crash, a timeout or an error between two tests is a failure that no test owns.
  if (code !== 0 && totals.failed === 0) totals.failed++;
}

async function run(command: readonly string[], env = process.env, timeout?: number): Promise<number> {
  const child = Bun.spawn([...command], {
    stdio: ["ignore", "inherit", "inherit"],
    env,
    timeout,
    killSignal: "SIGKILL",
  });
  return child.exited;
}
