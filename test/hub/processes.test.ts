import { afterEach, beforeEach, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { type FakeHub, fakeHub } from "../support/fake-hub.ts";
import { seededRandom, type TemporaryFolder, temporaryFolder } from "../support/safetensors.ts";

const KILLS = process.env.LONG_TESTS ? 50 : 5;
const RANGE_BYTES = 512 * 1024;
const random = seededRandom(3);

let hub: FakeHub;
let folder: TemporaryFolder;
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => {
  hub[Symbol.dispose]();
  folder[Symbol.dispose]();
});

function serve(bytes: number, bytesPerSecond: number): Uint8Array {
  const weights = Uint8Array.from({ length: bytes }, () => random() * 256);
  hub = fakeHub({ "org/model": { files: { "model.safetensors": weights } } }, { bytesPerSecond });
  return weights;
}

const SCRIPT = join(import.meta.dir, "../support/fetch-model.ts");
const start = () =>
  Bun.spawn([process.execPath, SCRIPT, hub.url, folder.path, `${RANGE_BYTES}`], { stdio: ["ignore", "pipe", "pipe"] });

/** Runs to its end; gives where the weights are. */
async function finish(child: ReturnType<typeof start>): Promise<{ path: string; log: string }> {
  const [output, log] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  expect({ code: await child.exited, log }).toEqual({ code: 0, log: expect.any(String) });
  return { path: output.trim().split("\n").at(-1)!, log };
}

test(
  `a download that is killed ${KILLS} times is completed with the same bytes, and each time loses at most one range's worth`,
  async () => {
    const weights = serve(KILLS * 2 ** 19 + 2 ** 20, 2 ** 18);
    for (let kill = 0; kill < KILLS; kill++) {
      const child = start();
      await child.stdout.getReader().read(); // it has begun
      await Bun.sleep(random() * 300);
      child.kill("SIGKILL");
      await child.exited;
    }
    hub.behaviour.bytesPerSecond = 2 ** 25;
    const { path } = await finish(start());
    expect(Bun.hash(readFileSync(path))).toBe(Bun.hash(weights));
    const again = hub.servedBytes() - weights.length;
    console.log(
      `${KILLS} kills: ${again} of ${weights.length} bytes were sent twice, ${Math.round(again / KILLS)} per kill`,
    );
    expect(again).toBeLessThanOrEqual(KILLS * RANGE_BYTES);
  },
  KILLS * 10_000,
);

describe("two processes that start at once", () => {
  test("share one download: the second waits, and says so", async () => {
    const weights = serve(2 ** 21, 2 ** 19);
    const [one, other] = await Promise.all([finish(start()), finish(start())]);
    expect(one.path).toBe(other.path);
    expect(Bun.hash(readFileSync(one.path))).toBe(Bun.hash(weights));
    expect(hub.servedBytes()).toBe(weights.length);
    expect(one.log + other.log).toMatch(
      /waiting for another process that fetches the same file.* file=model\.safetensors pid=\d+/,
    );
  }, 20_000);

  test("go on without the one that is killed: the other takes over where it was", async () => {
    const weights = serve(2 ** 21, 2 ** 18);
    const first = start();
    await first.stdout.getReader().read();
    const second = start();
    await Bun.sleep(400);
    hub.behaviour.bytesPerSecond = 2 ** 22;
    first.kill("SIGKILL");
    const { path } = await finish(second);
    expect(Bun.hash(readFileSync(path))).toBe(Bun.hash(weights));
    expect(hub.servedBytes() - weights.length).toBeLessThanOrEqual(RANGE_BYTES);
  }, 20_000);
});
