import { describe, expect, test } from "bun:test";
import type { GpuStage } from "../../src/engine/stage.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES, Oracle, rmsDistance, TINY, variant } from "../support/oracle.ts";
import { bits, floats, idsInput, openFixture, planFixture } from "../support/stages.ts";

const MODELS = [
  ["gpt2-tiny", TINY],
  ["odd-hidden", variant("odd-hidden")],
  ["n-inner", variant("n-inner")],
  ["untied", variant("untied")],
] as const;
const ENCODINGS = ["nf4", "int8"] as const;

/** What transformers with bitsandbytes computes: see `test/fixtures/README.md`. */
const oracleOf = (model: string) => new Oracle(FIXTURES, `bnb/${model}.safetensors`);

/** SwiftShader compiles kernels for minutes; the long tests give it those. */
const isSlow = (deviceName: string) => deviceName === "SwiftShader" && !process.env.LONG_TESTS;

describeOnDevices("a quantized GPT-2 is transformers' with bitsandbytes", ({ open, name: deviceName }) => {
  describe.each(MODELS.slice(0, isSlow(deviceName) ? 2 : undefined))("%s", (model, directory) => {
    test.each(ENCODINGS)(
      "in %s, at the logits and the layers before",
      async (encoding) => {
        const device = await open();
        const oracle = oracleOf(model);
        const stage = await openFixture(device, directory, { encoding });
        for (const prompt of ["one", "short", "middle", "unicode", "long", "full"]) {
          if (!oracle.has(`${prompt}.input_ids`)) continue;
          const input = idsInput(oracle.ints(`${prompt}.input_ids`));
          expectWithinNoise(oracle, await floats([stage], input, "all_logits"), `${prompt}.${encoding}`, "logits");
          if (!oracle.has(`${prompt}.${encoding}_dequant_fp32.norm`)) continue;
          expectWithinNoise(oracle, await floats([stage], input, "hidden"), `${prompt}.${encoding}`, "norm");
        }
        stage.destroy();
      },
      60_000,
    );
  });
});

describeOnDevices("a quantized stage", ({ open, name: deviceName }) => {
  const steps = isSlow(deviceName) ? 8 : 48;

  test.each(ENCODINGS)(
    "writes the sentence that transformers with bitsandbytes writes (%s)",
    async (encoding) => {
      const device = await open();
      const expected = [...oracleOf("gpt2-tiny").ints(`greedy.free.${encoding}_bf16.ids`)];
      const stage = await openFixture(device, TINY, { encoding });
      const ids = expected.slice(0, -48);
      for (let step = 0; step < steps; step++) {
        const output = await stage.forward(idsInput(ids), "token");
        if (output.kind === "token") ids.push(output.ids[0]!);
      }
      expect(ids).toEqual(expected.slice(0, ids.length));
      stage.destroy();
    },
    120_000,
  );

  test.each(ENCODINGS)(
    "gives the same bits wherever it is cut, and however its weights are split (%s)",
    async (encoding) => {
      const device = await open();
      const input = idsInput(new Oracle(TINY).ints("middle.input_ids"), [5, 6, 7]);
      const whole = await openFixture(device, TINY, { encoding });
      const expected = await bits([whole], input, "all_logits");
      const chains: GpuStage[][] = [
        [
          await openFixture(device, TINY, { encoding, end: 2 }),
          await openFixture(device, TINY, { encoding, start: 2 }),
        ],
        [await openFixture(device, TINY, { encoding, maxBindingBytes: 24_576 })], // 128 rows of 96
      ];
      for (const chain of chains)
        expect(Buffer.from((await bits(chain, input, "all_logits")).buffer).equals(Buffer.from(expected.buffer))).toBe(
          true,
        );
      for (const stage of [whole, ...chains.flat()]) stage.destroy();
    },
    60_000,
  );

  test("takes the memory that its plan says", async () => {
    const device = await open();
    const plain = await openFixture(device, TINY);
    await plain.forward(idsInput([1]), "token"); // the buffer for reading back is made when it is first used
    for (const encoding of ENCODINGS) {
      const stage = await openFixture(device, TINY, { encoding });
      const saved = plain.allocatedBytes - stage.allocatedBytes;
      expect(saved).toBe(planFixture(TINY).plan.deviceBytes - planFixture(TINY, { encoding }).plan.deviceBytes);
      stage.destroy();
    }
    plain.destroy();
  }, 60_000);

  test("of one encoding forms a chain with one of another", async () => {
    const device = await open();
    const ids = new Oracle(TINY).ints("short.input_ids");
    const head = await openFixture(device, TINY, { encoding: "nf4", end: 2 });
    const tail = await openFixture(device, TINY, { encoding: "int8", start: 2 });
    const whole = await openFixture(device, TINY);
    const mixed = await floats([head, tail], idsInput(ids), "logits");
    const plain = await floats([whole], idsInput(ids), "logits");
    expect(mixed.indexOf(Math.max(...mixed))).toBe(plain.indexOf(Math.max(...plain)));
    for (const stage of [head, tail, whole]) stage.destroy();
  }, 60_000);
});

/**
 * The oracle is the model with bitsandbytes' dequantized weights, in float32; its noise is what bfloat16 costs it. Within
 * 1.5 times that of the float32 run, and twice that of the bfloat16 run.
 */
function expectWithinNoise(oracle: Oracle, values: Float32Array, prompt: string, what: string): void {
  const fp32 = oracle.floats(`${prompt}_dequant_fp32.${what}`);
  const bf16 = oracle.floats(`${prompt}_dequant_bf16.${what}`);
  const noise = rmsDistance(bf16, fp32);
  const [toFp32, toBf16] = [rmsDistance(values, fp32), rmsDistance(values, bf16)];
  const verdict = { prompt, what, nearFp32: toFp32 <= 1.5 * noise, nearBf16: toBf16 <= 2 * noise };
  expect({ ...verdict, toFp32, toBf16, noise }).toMatchObject({ nearFp32: true, nearBf16: true });
}

test("an NF4 weight takes half a byte and its share of an absmax, an INT8 weight a byte and its share of an SCB", () => {
  const bytesOf = (encoding: "nf4" | "int8") => {
    const { plan } = planFixture(TINY, { encoding });
    return plan.weights.find(({ source }) => source.name === "h.0.mlp.c_fc.weight")!.deviceBytes / (384 * 96);
  };
  expect(bytesOf("nf4")).toBe(0.5 + 4 / 64);
  expect(bytesOf("int8")).toBe(1 + 4 / 96);
});
