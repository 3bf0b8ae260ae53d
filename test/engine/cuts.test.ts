import { expect, test } from "bun:test";
import type { GpuStage } from "../../src/engine/stage.ts";
import type { Device } from "../../src/gpu/device.ts";
import { describeOnDevices } from "../support/device.ts";
import { Oracle, TINY, variant } from "../support/oracle.ts";
import { bits, idsInput, openFixture } from "../support/stages.ts";

const LAYERS = 4;
/** Every way to share the layers out: [4], [1, 3], [2, 2], … [1, 1, 1, 1], as the ends of the spans. */
const SPLITS = Array.from({ length: 2 ** (LAYERS - 1) }, (_, mask) =>
  [1, 2, 3].filter((cut) => mask & (1 << (cut - 1))).concat(LAYERS),
);

const oracle = new Oracle(TINY);
const prompt = (name: string): Int32Array => oracle.ints(`${name}.input_ids`);

describeOnDevices("a cut", ({ open }) => {
  test("anywhere, and as many as there are, leaves every logit as it is, bit for bit", async () => {
    const device = await open();
    const input = idsInput(prompt("long"), prompt("one"), prompt("middle"));
    const whole = await withChain(device, [LAYERS], (stages) => bits(stages, input, "all_logits"));
    for (const ends of SPLITS) {
      const logits = await withChain(device, ends, (stages) => bits(stages, input, "all_logits"));
      expect({ ends, same: sameBits(logits, whole) }).toEqual({ ends, same: true });
    }
  }, 120_000);
});

describeOnDevices("a stage", ({ open }) => {
  test("gives the same bits when it runs again, and when it is loaded again", async () => {
    const device = await open();
    const input = idsInput(prompt("unicode"));
    const run = () =>
      withChain(device, [LAYERS], async (s) => [await bits(s, input, "logits"), await bits(s, input, "logits")]);
    const [first, second] = await run();
    const [third] = await run();
    expect(sameBits(first!, second!) && sameBits(first!, third!)).toBe(true);
  }, 60_000);

  test("gives a row the same bits whatever rows come with it", async () => {
    const device = await open();
    const rows = ["one", "short", "middle", "unicode", "long", "tail"].map(prompt);
    await withChain(device, [LAYERS], async (stages) => {
      const together = await bits(stages, idsInput(...rows), "logits");
      const { vocabSize } = stages[0]!.info;
      for (const [index, row] of rows.entries()) {
        const alone = await bits(stages, idsInput(row), "logits");
        expect(sameBits(alone, together.subarray(index * vocabSize, (index + 1) * vocabSize))).toBe(true);
      }
    });
  }, 60_000);

  test("gives a token the same bits whatever tokens follow it", async () => {
    const device = await open();
    const row = prompt("long");
    await withChain(device, [LAYERS], async (stages) => {
      const { vocabSize } = stages[0]!.info;
      const whole = await bits(stages, idsInput(row), "all_logits");
      for (const length of [1, 2, 31, 32, 33, 73]) {
        const beginning = await bits(stages, idsInput(row.subarray(0, length)), "all_logits");
        expect({ length, same: sameBits(beginning, whole.subarray(0, length * vocabSize)) }).toEqual({
          length,
          same: true,
        });
      }
    });
  }, 60_000);

  test("that has to split its weights by rows gives the same bits", async () => {
    const device = await open();
    for (const directory of [TINY, variant("odd-head"), variant("odd-hidden")]) {
      const input = idsInput([1, 2, 3, 4, 5, 60, 70]);
      const whole = await openFixture(device, directory);
      const split = await openFixture(device, directory, { maxBindingBytes: 4096 }); // 21 rows of 96, where wte has 1024
      expect(sameBits(await bits([split], input, "all_logits"), await bits([whole], input, "all_logits"))).toBe(true);
      whole.destroy();
      split.destroy();
    }
  }, 60_000);

  test("stops a call that nobody waits for any more, and goes on with the next one", async () => {
    const device = await open();
    const small = await openFixture(device, TINY, { maxContext: 32 });
    const rows = Array.from({ length: 500 }, () => [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]);
    const controller = new AbortController();
    const call = small.forward(idsInput(...rows), "token", controller.signal);
    setTimeout(() => controller.abort(new Error("gone")), 100);
    expect(call).rejects.toThrow("gone");
    await call.catch(() => {});
    const next = await small.forward(idsInput([1, 2, 3]), "token");
    expect(next.kind).toBe("token");
    small.destroy();
  }, 60_000);

  test("takes calls with more tokens than one pass has room for", async () => {
    const device = await open();
    const small = await openFixture(device, TINY, { maxContext: 32 });
    const rows = Array.from({ length: 10 }, (_, i) => prompt("middle").subarray(0, 5 + i));
    const together = await bits([small], idsInput(...rows), "all_logits");
    const alone = await Promise.all(rows.map((row) => bits([small], idsInput(row), "all_logits")));
    expect(sameBits(together, Uint16Array.from(alone.flatMap((values) => [...values])))).toBe(true);
    small.destroy();
  }, 60_000);
});

async function withChain<T>(device: Device, ends: number[], use: (stages: GpuStage[]) => Promise<T>): Promise<T> {
  const stages: GpuStage[] = [];
  for (const [index, end] of ends.entries())
    stages.push(await openFixture(device, TINY, { start: ends[index - 1] ?? 0, end }));
  try {
    return await use(stages);
  } finally {
    for (const stage of stages) stage.destroy();
    await device.reclaim();
  }
}

const sameBits = (a: Uint16Array, b: Uint16Array): boolean =>
  Buffer.from(a.buffer, a.byteOffset, a.byteLength).equals(Buffer.from(b.buffer, b.byteOffset, b.byteLength));
