import { describe, expect, test } from "bun:test";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import type { GpuStage } from "../../src/engine/stage.ts";
import { Commands } from "../../src/gpu/commands.ts";
import { TensorStore } from "../../src/gpu/tensor.ts";
import { softwareDevices } from "../support/device.ts";
import { FailingDevice, type Failure } from "../support/failing-device.ts";
import { FIXTURES, TINY } from "../support/oracle.ts";
import { idsInput, openFixture, type StageRange } from "../support/stages.ts";

const NF4 = join(FIXTURES, "bnb/checkpoints/nf4");
const INT8 = join(FIXTURES, "bnb/checkpoints/int8");

const IDS = Array.from({ length: 40 }, (_, i) => (i * 37) % 1000);

/** What a stage gives for some tokens, as bits. */
async function answerOf(stage: GpuStage): Promise<string> {
  const input = idsInput(IDS, IDS.slice(0, 3));
  const output = await stage.forward(input, "logits");
  if (!("values" in output)) throw new Error(`it gave ${output.kind}`);
  return Buffer.from(output.values.buffer, output.values.byteOffset, output.values.byteLength).toString("base64");
}

const testDevice = softwareDevices[0]!; // what fails is between the program and the driver: one driver shows it

describe.skipIf(!testDevice.adapter)("out of memory (needs lavapipe)", () => {
  test.each<[name: string, model: string, range: StageRange]>([
    ["the head in bfloat16", TINY, { end: 1 }],
    ["the tail in bfloat16", TINY, { start: 3 }],
    ["a layer in int8", TINY, { start: 1, end: 2, encoding: "int8" }],
    ["a layer in nf4", TINY, { start: 1, end: 2, encoding: "nf4" }],
    ["a layer that the checkpoint has in int8", INT8, { start: 1, end: 2 }],
    ["a layer that the checkpoint has in nf4", NF4, { start: 1, end: 2 }],
    ["a layer in parts", TINY, { start: 1, end: 2, maxBindingBytes: 1 << 18 }],
  ])(
    "at any allocation of opening %s is does_not_fit, and everything is given back",
    async (_, model, range) => {
      using failing = await FailingDevice.open(testDevice, unexpected);
      const open = () => openFixture(failing.device, model, range);
      const sites: Partial<Record<Failure, number>> = {};
      for (const kind of ["buffer", "throws", "write"] as const) {
        failing.failAt(kind, Infinity);
        const whole = await open();
        sites[kind] = failing.allocations;
        const { allocatedBytes } = whole;
        expect(allocatedBytes).toBeGreaterThan(0);
        whole.destroy();
        expect(failing.alive).toEqual([]);

        for (let nth = 0; nth < sites[kind]; nth++) {
          failing.failAt(kind, nth);
          const outcome = await open().catch((error: unknown) => error);
          expect(outcome).toBeInstanceOf(UserError);
          expect({ nth, kind, code: (outcome as UserError).code }).toEqual({ nth, kind, code: "does_not_fit" });
          expect({ nth, kind, alive: failing.alive }).toEqual({ nth, kind, alive: [] });
          expect(failing.isReclaimed).toBe(true);
        }
      }
      expect(sites.buffer).toBeGreaterThan(30);
      expect(sites.write).toBeGreaterThan(10);
      failing.failAt("buffer", Infinity);
      const after = await open();
      expect(after.allocatedBytes).toBeGreaterThan(0);
      after.destroy();
    },
    60_000,
  );

  test("at any write of a pass fails that call with does_not_fit, and the next one has the right bits", async () => {
    using failing = await FailingDevice.open(testDevice, () => {});
    const stage = await openFixture(failing.device, TINY, { maxContext: 64 });
    const right = await answerOf(stage);
    failing.failAt("write", Infinity);
    await answerOf(stage);
    const writes = failing.allocations;
    expect(writes).toBeGreaterThan(4);
    for (let nth = 0; nth < writes; nth++) {
      failing.failAt("write", nth);
      const error = await answerOf(stage).catch((reason: unknown) => reason);
      expect(error).toMatchObject({ code: "does_not_fit", message: expect.stringContaining("no memory left") });
      expect({ nth, right: (await answerOf(stage)) === right }).toEqual({ nth, right: true });
      expect(stage.cacheUse.sessions).toBe(0);
    }
    stage.destroy();
    expect(failing.alive).toEqual([]);
  }, 120_000);

  test("in a pass asks the device for no buffer that was not there before", async () => {
    using failing = await FailingDevice.open(testDevice, unexpected);
    const stage = await openFixture(failing.device, TINY, { maxContext: 64 });
    failing.failAt("buffer", Infinity);
    await stage.warmUp();
    for (const want of ["logits", "token", "hidden", "none", "all_logits"] as const) {
      await stage.forward(idsInput(IDS), want);
    }
    expect(failing.allocations).toBe(0);
    stage.destroy();
  }, 30_000);

  test.each(["buffer", "throws"] as const)(
    "for a larger readback (%s) fails that read, and the next one goes well",
    async (kind) => {
      using failing = await FailingDevice.open(testDevice, () => {});
      const store = new TensorStore(failing.device);
      const commands = new Commands(failing.device);
      const tensor = store.create("large", 1, 1 << 16, "u32");
      store.write(
        tensor,
        Uint32Array.from({ length: 1 << 16 }, (_, i) => i),
      );
      expect(await commands.read(tensor, 16)).toHaveLength(16);
      failing.failAt(kind, 0);
      expect(await commands.read(tensor).catch((error: Error) => error)).toBeInstanceOf(Error);
      expect(new Uint32Array((await commands.read(tensor)).buffer).at(-1)).toBe((1 << 16) - 1);
      store.destroyAll();
      commands.destroy();
      expect(failing.alive).toEqual([]);
    },
  );
});

/** An error outside of every scope would be a line of the log that looks like a bug. */
function unexpected(message: string): void {
  void Promise.reject(new Error(`GPU error: ${message}`));
}
