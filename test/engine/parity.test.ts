import { describe, test } from "bun:test";
import { readdirSync } from "node:fs";
import { describeOnDevices } from "../support/device.ts";
import { expectWithinNoise, layersIn } from "../support/gate.ts";
import { FIXTURES, Oracle, TINY, variant } from "../support/oracle.ts";
import { floats, idsInput, openFixture } from "../support/stages.ts";

const VARIANTS = readdirSync(`${FIXTURES}/gpt2-variants`, { withFileTypes: true })
  .filter((entry) => entry.isDirectory())
  .map((entry) => entry.name);

describeOnDevices("GPT-2 is transformers' GPT-2", ({ open }) => {
  describe.each([["gpt2-tiny", TINY], ...VARIANTS.map((name) => [name, variant(name)])])("%s", (_, directory) => {
    test("at every layer, at the norm and at the logits", async () => {
      const device = await open();
      const oracle = new Oracle(directory!);
      const prompts = ["one", "short", "middle", "unicode", "long", "full"].filter((p) => oracle.has(`${p}.input_ids`));
      const layers = layersIn(oracle, prompts[0]!);

      for (let layer = 1; layer < layers; layer++) {
        const stage = await openFixture(device, directory!, { end: layer });
        for (const prompt of prompts) {
          const hidden = await floats([stage], idsInput(oracle.ints(`${prompt}.input_ids`)), "hidden");
          expectWithinNoise(oracle, hidden, prompt, `hidden.${layer}`);
        }
        stage.destroy();
      }
      const whole = await openFixture(device, directory!);
      for (const prompt of prompts) {
        const input = idsInput(oracle.ints(`${prompt}.input_ids`));
        expectWithinNoise(oracle, await floats([whole], input, "hidden"), prompt, "norm");
        expectWithinNoise(oracle, await floats([whole], input, "all_logits"), prompt, "logits");
      }
      whole.destroy();
      await device.reclaim();
    }, 120_000);
  });
});
