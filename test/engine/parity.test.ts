import { describe, expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES, Oracle, rmsDistance, TINY, variant } from "../support/oracle.ts";
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

function layersIn(oracle: Oracle, prompt: string): number {
  let layers = 0;
  while (oracle.has(`${prompt}.fp32.hidden.${layers + 1}`)) layers++;
  return layers;
}

/**
 * The gate: as near to the float32 oracle as 1.5 times what bfloat16 costs transformers itself, and to its bfloat16
 * run as twice that.
 */
function expectWithinNoise(oracle: Oracle, values: Float32Array, prompt: string, what: string): void {
  const fp32 = oracle.floats(`${prompt}.fp32.${what}`);
  const bf16 = oracle.floats(`${prompt}.bf16_eager.${what}`);
  const noise = rmsDistance(bf16, fp32);
  const toFp32 = rmsDistance(values, fp32);
  const toBf16 = rmsDistance(values, bf16);
  if (process.env.SHOW)
    console.log(prompt, what, (toFp32 / noise).toFixed(3), (toBf16 / noise).toFixed(3), noise.toFixed(5));
  expect({
    prompt,
    what,
    overFp32: toFp32 > 1.5 * noise,
    overBf16: toBf16 > 2 * noise,
    toFp32,
    toBf16,
    noise,
  }).toMatchObject({
    overFp32: false,
    overBf16: false,
  });
}
