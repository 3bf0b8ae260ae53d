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

describeOnDevices("greedy tokens", ({ open }) => {
  test.each(["free", "patent", "convey", "stops"])(
    "are transformers' (%s), wherever its best two logits are further apart than its noise",
    async (name) => {
      const device = await open();
      const ids = oracle.ints(`greedy.${name}.fp32.ids`);
      const gaps = oracle.floats(`greedy.${name}.fp32.top2_gap`);
      const promptLength = ids.length - gaps.length;
      const stage = await openFixture(device, TINY);
      const session = await stage.open({ maxLength: ids.length, stay: "lasting" });
      let compared = 0;
      for (const [step, gap] of gaps.entries()) {
        // The prompt, then the oracle's own tokens, so that a tie does not end the comparison.
        const positionStart = step === 0 ? 0 : promptLength + step - 1;
        const input = { kind: "ids", ids: ids.slice(positionStart, promptLength + step) } as const;
        const output = await session.run({ input, positionStart, want: "token" });
        if (output.kind !== "token") throw new Error(output.kind);
        if (gap > noise) {
          expect({ step, id: output.id }).toEqual({ step, id: ids[promptLength + step]! });
          compared++;
        }
      }
      expect(compared).toBeGreaterThanOrEqual(gaps.length * 0.9);
      session.close();
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
