import { expect, test } from "bun:test";
import { join } from "node:path";

const SOURCES = join(import.meta.dir, "../../src");

// In a process of its own, since it is about file descriptor 2.
async function run(body: string): Promise<{ stderr: string; log: string }> {
  const program = `
    import { writeSync } from "node:fs";
    import { createLogger } from ${JSON.stringify(join(SOURCES, "base/log.ts"))};
    import { captureStderr } from ${JSON.stringify(join(SOURCES, "gpu/capture-stderr.ts"))};
    const log = createLogger({ level: "debug", format: "text", write: (line) => console.log(line) });
    ${body}
  `;
  const child = Bun.spawn([process.execPath, "-e", program], { stdout: "pipe", stderr: "pipe" });
  const [log, stderr] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  expect(await child.exited).toBe(0);
  return { stderr, log };
}

const onLinux = test.skipIf(process.platform !== "linux");

onLinux("a driver's warning goes into the debug log instead of stderr (Linux only)", async () => {
  const { stderr, log } = await run(
    `await captureStderr(log, async () => { await Bun.sleep(1); writeSync(2, "Warning: reduced\\n"); });`,
  );
  expect(stderr).toBe("");
  expect(log).toContain('debug native_warning text="Warning: reduced"');
});

onLinux("what others write to stderr meanwhile appears there afterwards (Linux only)", async () => {
  const { stderr, log } = await run(`
    await captureStderr(log, async () => { writeSync(2, "Warning: reduced\\nmy line\\n"); console.error("another"); });
    console.error("after");
  `);
  expect(stderr).toBe("my line\nanother\nafter\n");
  expect(log).not.toContain("my line");
});

onLinux("stderr is back after a failure, and the failure is passed on (Linux only)", async () => {
  const { stderr, log } = await run(`
    await captureStderr(log, () => Promise.reject(new Error("no adapter"))).catch((error) => console.log(error.message));
    console.error("after");
  `);
  expect(log).toContain("no adapter");
  expect(stderr).toBe("after\n");
});

onLinux("a capture within a capture leaves stderr to the outer one (Linux only)", async () => {
  const { stderr, log } = await run(`
    await captureStderr(log, () => captureStderr(log, async () => writeSync(2, "Warning: inner\\n")));
    console.error("after");
  `);
  expect(stderr).toBe("after\n");
  expect(log).toContain("Warning: inner");
});
