import { expect, test } from "bun:test";
import { describeOnDevices } from "../support/device.ts";
import { Oracle, rmsDistance, TINY } from "../support/oracle.ts";
import { floats, idsInput, openFixture } from "../support/stages.ts";

const oracle = new Oracle(TINY);
/** What bfloat16 costs transformers at the logits, at most over the prompts. */
const noise = Math.max(
  ...["one", "short", "middle", "unicode", "long"].map((prompt) =>
    rmsDistance(oracle.floats(`${prompt}.bf16_eager.logits`), oracle.floats(`${prompt}.fp32.logits`)),
  ),
);

/** SwiftShader takes minutes for all; the long tests give it those. */
const stepsOn = (device: string): number => (device === "SwiftShader" && !process.env.LONG_TESTS ? 12 : Infinity);

describeOnDevices("greedy tokens", ({ open, name: deviceName }) => {
  test.each(["free", "patent", "convey", "stops"])(
    "are transformers' (%s), wherever its best two logits are further apart than its noise",
    async (name) => {
      const device = await open();
      const ids = oracle.ints(`greedy.${name}.fp32.ids`);
      const gaps = oracle.floats(`greedy.${name}.fp32.top2_gap`);
      const promptLength = ids.length - gaps.length;
      const stage = await openFixture(device, TINY);
      const sequence = [...ids.subarray(0, promptLength)];
      let compared = 0;
      const steps = Math.min(gaps.length, stepsOn(deviceName));
      for (const [step, gap] of gaps.subarray(0, steps).entries()) {
        const output = await stage.forward(idsInput(sequence), "token");
        if (output.kind !== "token") throw new Error(output.kind);
        const expected = ids[promptLength + step]!;
        if (gap > noise) {
          expect({ step, id: output.ids[0] }).toEqual({ step, id: expected });
          compared++;
        }
        sequence.push(expected); // the oracle's own token, so that a tie does not end the comparison
      }
      expect(compared).toBeGreaterThanOrEqual(steps * 0.9);
      stage.destroy();
    },
    300_000,
  );

  test("of a left-padded batch are those of each prompt alone, and transformers' own", async () => {
    const device = await open();
    const stage = await openFixture(device, TINY);
    const rows = ["one", "short", "middle"].map((prompt) => oracle.ints(`${prompt}.input_ids`));
    const logits = await floats([stage], idsInput(...rows), "logits");
    const expected = oracle.floats("batch.fp32.logits_last");
    const bf16 = oracle.floats("batch.bf16_eager.logits_last");
    expect(rmsDistance(logits, expected)).toBeLessThanOrEqual(1.5 * rmsDistance(bf16, expected));

    const together = await stage.forward(idsInput(...rows), "token");
    const alone = await Promise.all(rows.map((row) => stage.forward(idsInput(row), "token")));
    expect(together).toEqual({ kind: "token", ids: alone.flatMap((one) => (one.kind === "token" ? one.ids : [])) });
    stage.destroy();
  }, 60_000);
});
