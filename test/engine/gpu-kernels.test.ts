import { expect, test } from "bun:test";
import { join } from "node:path";
import type { Device } from "../../src/gpu/device.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES, Oracle } from "../support/oracle.ts";
import { bits, idsInput, openFixture, type StageRange } from "../support/stages.ts";

/** An ordinary model and mixtures, with prompts longer than a tile of the kernels for GPUs, and a single token. */
const MODELS: readonly (StageRange & { name: string; prompt: string })[] = [
  { name: "gpt2-tiny", prompt: "long", encoding: "bf16" },
  { name: "gpt2-tiny", prompt: "long", encoding: "nf4" },
  { name: "families/qwen2_moe", prompt: "full", encoding: "bf16" },
  { name: "families/deepseek_v3", prompt: "full", encoding: "int8" },
];

// A software device takes kernels of its own for what a weight multiplies. Those for GPUs run there as well, only slower.
describeOnDevices("the kernels for GPUs", ({ open }) => {
  test.each(MODELS)(
    "give a whole model the bits that those for CPUs give it: $name in $encoding",
    async ({ name, prompt, ...range }) => {
      const directory = join(FIXTURES, name);
      const row = new Oracle(directory).ints(`${prompt}.input_ids`);
      const logits = async (device: Device) => {
        const stage = await openFixture(device, directory, range);
        try {
          return [
            await bits([stage], idsInput(row), "all_logits"),
            await bits([stage], idsInput(row.subarray(0, 1)), "all_logits"),
          ];
        } finally {
          stage.destroy();
        }
      };
      const device = await open();
      const byCpu = await logits(device);
      device.info.isSoftware = false; // what a node asks before it takes kernels for GPUs
      try {
        expect(await logits(device)).toEqual(byCpu);
      } finally {
        device.info.isSoftware = true;
      }
    },
    120_000,
  );
});
