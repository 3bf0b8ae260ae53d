import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { openStage } from "../../src/engine/open-stage.ts";
import type { GpuStage } from "../../src/engine/stage.ts";
import type { StageInput } from "../../src/engine/types.ts";
import type { Device } from "../../src/gpu/device.ts";
import { readModel } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { type LoadPlan, neededNames, planLoad } from "../../src/weights/plan.ts";
import { bitsOfBf16 } from "../../src/kernels/reference/bf16.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES, Oracle, rmsDistance, TINY, variant } from "../support/oracle.ts";
import { bits, floats, idsInput } from "../support/stages.ts";

const MODELS = [
  ["gpt2-tiny", TINY],
  ["odd-hidden", variant("odd-hidden")], // the only one whose activations reach 6
  ["n-inner", variant("n-inner")],
  ["untied", variant("untied")],
] as const;

/** What transformers with bitsandbytes computes: see `test/fixtures/README.md`. */
const oracleOf = (model: string) => new Oracle(FIXTURES, `bnb/${model}.safetensors`);

interface Options {
  start?: number;
  end?: number;
  maxBindingBytes?: number;
  /** Without them: the same weights, multiplied by activations as they are. */
  int8Activations?: boolean;
}

async function open(device: Device, directory: string, options: Options = {}): Promise<GpuStage & { plan: LoadPlan }> {
  const { start = 0, end, maxBindingBytes, int8Activations = true } = options;
  const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const span = { start, end: end ?? config.layers, total: config.layers };
  const maxContext = Math.min(config.maxPositions, 256);
  const stageOptions = { span, maxContext, maxSessions: 4, encoding: "int8", int8Activations } as const;
  const names = neededNames(family, config, stageOptions);
  const checkpoint = openCheckpoint(directory, { needs: (name) => names.has(name) });
  const plan = planLoad(family, config, stageOptions, checkpoint);
  return Object.assign(await openStage({ device, family, config, plan, eosTokenIds: [], maxBindingBytes }), { plan });
}

describeOnDevices("a GPT-2 with INT8 activations is transformers' with bitsandbytes", ({ open: openDevice }) => {
  test.each(MODELS)(
    "at the logits of %s",
    async (model, directory) => {
      const oracle = oracleOf(model);
      const stage = await open(await openDevice(), directory);
      for (const prompt of ["one", "short", "middle", "unicode", "long", "full"]) {
        if (!oracle.has(`${prompt}.input_ids`)) continue;
        const input = idsInput(oracle.ints(`${prompt}.input_ids`));
        expectWithinNoise(oracle, await floats([stage], input, "all_logits"), prompt);
      }
      stage.destroy();
    },
    60_000,
  );

  test("at a layer with outlier columns, where the same weights alone are not", async () => {
    const device = await openDevice();
    const oracle = oracleOf("odd-hidden");
    const [tokens] = oracle.shape("full.int8_bf16.hidden.0");
    const input: StageInput = {
      kind: "hidden",
      rows: [{ tokens: tokens!, positionStart: 0 }],
      hidden: Uint16Array.from(oracle.floats("full.int8_bf16.hidden.0"), bitsOfBf16),
    };
    const distance = async (int8Activations: boolean) => {
      const layer = await open(device, variant("odd-hidden"), { end: 1, int8Activations });
      const hidden = await floats([layer], input, "hidden");
      layer.destroy();
      return rmsDistance(hidden, oracle.floats("full.int8_bf16.hidden.1"));
    };
    expect(await distance(true)).toBeLessThan(0.7 * (await distance(false)));
  }, 60_000);
});

describeOnDevices("a stage with INT8 activations", ({ open: openDevice, name: deviceName }) => {
  const steps = deviceName === "SwiftShader" && !process.env.LONG_TESTS ? 8 : 48; // minutes there

  test("writes the sentence that transformers with bitsandbytes writes", async () => {
    const expected = [...oracleOf("gpt2-tiny").ints("greedy.free.int8_bf16.ids")];
    const stage = await open(await openDevice(), TINY);
    const ids = expected.slice(0, -48);
    for (let step = 0; step < steps; step++) {
      const output = await stage.forward(idsInput(ids), "token");
      if (output.kind === "token") ids.push(output.ids[0]!);
    }
    expect(ids).toEqual(expected.slice(0, ids.length));
    stage.destroy();
  }, 120_000);

  test("gives the same bits wherever it is cut, and however its weights are split", async () => {
    const device = await openDevice();
    const directory = variant("odd-hidden");
    const input = idsInput(oracleOf("odd-hidden").ints("full.input_ids").subarray(0, 24), [5, 6, 7]);
    const whole = await open(device, directory);
    const expected = await bits([whole], input, "all_logits");
    const chains: GpuStage[][] = [
      [await open(device, directory, { end: 1 }), await open(device, directory, { start: 1 })],
      [await open(device, directory, { maxBindingBytes: 52_000 })], // 250 rows of 100
    ];
    for (const chain of chains) expect(await bits(chain, input, "all_logits")).toEqual(expected);
    for (const stage of [whole, ...chains.flat()]) stage.destroy();
  }, 60_000);

  describe("gives a sequence other numbers in other company", () => {
    const alone = (model: string) => oracleOf(model).ints("short.input_ids");
    const other = (model: string) => oracleOf(model).ints("full.input_ids").subarray(0, 24); // one pass takes 32

    /** Whether the logits of a sequence are the same alone and with another in the call. */
    const isSteady = async (device: Device, directory: string, ids: Int32Array, more: Int32Array, options: Options) => {
      const stage = await open(device, directory, options);
      const byItself = await bits([stage], idsInput(ids), "all_logits");
      const together = await bits([stage], idsInput(ids, more), "all_logits");
      stage.destroy();
      return Buffer.from(byItself.buffer).equals(Buffer.from(together.buffer, 0, byItself.byteLength));
    };

    test.each([
      ["where that has outliers", "odd-hidden", { int8Activations: true }, false],
      ["but not where nobody has", "n-inner", { int8Activations: true }, true],
      ["and never by INT8 weights alone", "odd-hidden", { int8Activations: false }, true],
    ] as const)(
      "%s (%s)",
      async (_, model, options, expected) => {
        const device = await openDevice();
        expect(await isSteady(device, variant(model), alone(model), other(model), options)).toBe(expected);
      },
      60_000,
    );
  });

  test("takes the device memory that its plan says", async () => {
    const device = await openDevice();
    const [plain, int8] = [await open(device, TINY, { int8Activations: false }), await open(device, TINY)];
    const more = int8.plan.deviceBytes - plain.plan.deviceBytes;
    // A pass of 512 tokens: codes of 96 and of 384 columns, a scale for each; a bit for each column, in 16 bytes at least.
    expect(more).toBe(512 * (96 + 384 + 4) + 16 + 48);
    expect(int8.allocatedBytes - plain.allocatedBytes).toBe(more);
    plain.destroy();
    int8.destroy();
  }, 60_000);
});

/**
 * The oracle is the model with bitsandbytes' dequantized weights, in float32; its noise is what LLM.int8() in bfloat16
 * costs it. Within 1.5 times that of the float32 run, and of LLM.int8()'s own. The two noises do not cancel: a last bit of
 * an activation moves a code, and a code is as large as the noise.
 */
function expectWithinNoise(oracle: Oracle, logits: Float32Array, prompt: string): void {
  const fp32 = oracle.floats(`${prompt}.int8_dequant_fp32.logits`);
  const bnb = oracle.floats(`${prompt}.int8_bf16.logits`);
  const noise = rmsDistance(bnb, fp32);
  const [toFp32, toBnb] = [rmsDistance(logits, fp32), rmsDistance(logits, bnb)];
  const verdict = { prompt, nearFp32: toFp32 <= 1.5 * noise, nearBnb: toBnb <= 1.5 * noise };
  expect({ ...verdict, toFp32, toBnb, noise }).toMatchObject({ nearFp32: true, nearBnb: true });
}
