import { beforeEach, afterEach, expect, test } from "bun:test";
import { join } from "node:path";
import { softwareDevices } from "../support/device.ts";
import type { ChangedLoad } from "../support/load-while-changed.ts";
import { FIXTURES } from "../support/oracle.ts";
import { type TemporaryFolder, temporaryFolder } from "../support/safetensors.ts";

const device = softwareDevices.find(({ adapter }) => adapter !== undefined);

let folder: TemporaryFolder;
beforeEach(async () => {
  folder = temporaryFolder();
  await bun(join(FIXTURES, "gpt2-124m.ts"), folder.path, "2", "128");
});
afterEach(() => folder[Symbol.dispose]());

test.skipIf(!device)(
  "a file that is cut short in the middle of a load is refused with both sizes, and the process lives on",
  async () => {
    const { error, cutAt, fullSize, logitsAfterwards } = await load("truncate");
    expect(error).toMatchObject({ isUserError: true, code: "bad_model" });
    expect(error!.message).toMatch(/^model.safetensors: bytes \d+-\d+ are wanted /);
    expect(error!.message).toEndWith(`had ${fullSize} bytes when its header was read, and now it has ${cutAt}`);
    expect(logitsAfterwards).toBeGreaterThan(0);
  },
  60_000,
);

test.skipIf(!device)(
  "a file that is deleted in the middle of a load is loaded to its end",
  async () => {
    expect((await load("unlink")).error).toBeUndefined();
  },
  60_000,
);

const load = async (change: string): Promise<ChangedLoad> =>
  JSON.parse(
    await bun(join(import.meta.dir, "../support/load-while-changed.ts"), folder.path, device!.adapter!, change),
  );

async function bun(...words: string[]): Promise<string> {
  const child = Bun.spawn([process.execPath, ...words], { stdio: ["ignore", "pipe", "inherit"] });
  const output = await new Response(child.stdout).text();
  expect(await child.exited).toBe(0); // 135 is SIGBUS
  return output;
}
