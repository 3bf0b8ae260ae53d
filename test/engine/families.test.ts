import { beforeAll, describe, expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import type { GpuStage } from "../../src/engine/stage.ts";
import type { Device } from "../../src/gpu/device.ts";
import { bf16ArrayToF32 } from "../../src/quant/bf16.ts";
import { describeOnDevices } from "../support/device.ts";
import { expectWithinNoise, layersIn } from "../support/gate.ts";
import { FIXTURES, Oracle, rmsDistance } from "../support/oracle.ts";
import { bits, idsInput, openFixture, type StageRange } from "../support/stages.ts";

interface Family {
  /** The context of a node that gives this prompt, where the numbers depend on it. */
  contexts?: Record<string, number>;
}

/** Every fixture of `families.py` is a row; what is said of one is all that sets it apart. */
const FAMILIES: Record<string, Family> = {
  llama: {},
  "llama-minimal": {},
  "llama-linear": {},
  "llama-dynamic": { contexts: { short: 64, full: 64 } }, // longer than the 16 positions that the model knows
  "llama-yarn": {},
  mistral: {},
  "mistral-no-window": {},
  "mistral-layer-types": {},
  qwen2: {},
  "qwen2-unused-window": {},
  qwen3: {},
  gemma: {},
  gemma2: {},
  "gemma2-uncapped": {},
  gemma3: {},
  "gemma3-pictures": {},
  phi3: { contexts: { short: 16, full: 64 } }, // up to 16 tokens the short factors, beyond them the long ones
  "phi3-plain": {},
  gpt_neox: {},
  "gpt_neox-sequential": {},
  mixtral: {},
  qwen3_moe: {},
  "qwen3_moe-normalized": {},
  qwen2_moe: {},
  deepseek_v2: {},
  "deepseek_v2-groups": {},
  deepseek_v3: {},
  "deepseek_v3-plain": {},
  "deepseek_v3-fp8": {},
};

/** These reach every kernel and every way to wire it. SwiftShader compiles for minutes for all: the long tests do. */
const ON_A_SLOW_DEVICE = ["llama", "qwen3", "gemma2", "phi3", "gpt_neox", "qwen2_moe", "deepseek_v3-fp8"];
const familiesOn = (device: string) =>
  Object.entries(FAMILIES).filter(
    ([name]) => device !== "SwiftShader" || process.env.LONG_TESTS || ON_A_SLOW_DEVICE.includes(name),
  );

const PROMPTS = ["short", "full"];
const folderOf = (name: string): string => join(FIXTURES, "families", name);

test("every fixture is a row here", () => {
  const folders = readdirSync(join(FIXTURES, "families"), { withFileTypes: true }).filter((entry) =>
    entry.isDirectory(),
  );
  expect(folders.map(({ name }) => name).toSorted()).toEqual(Object.keys(FAMILIES).toSorted());
});

describeOnDevices("a family", ({ open, name: deviceName }) => {
  let device: Device;
  beforeAll(async () => void (device = await open()));

  describe.each(familiesOn(deviceName))("%s", (name, { contexts }) => {
    const oracle = new Oracle(folderOf(name));
    const idsOf = (prompt: string) => oracle.ints(`${prompt}.input_ids`);
    const layers = layersIn(oracle, "short");
    const contextOf = (prompt: string) => contexts?.[prompt];

    /** [tokens, width] bfloat16 for one prompt, from the spans that end at `ends`. */
    const run = async (prompt: string, ends: number[], want: "hidden" | "all_logits", range: StageRange = {}) => {
      const stages: GpuStage[] = [];
      for (const [index, end] of ends.entries()) {
        const start = ends[index - 1] ?? 0;
        stages.push(await openFixture(device, folderOf(name), { maxContext: contextOf(prompt), ...range, start, end }));
      }
      try {
        return await bits(stages, idsInput(idsOf(prompt)), want);
      } finally {
        for (const stage of stages) stage.destroy();
        await device.reclaim();
      }
    };

    test("is transformers' at every layer, at the norm and at the logits", async () => {
      for (const prompt of PROMPTS) {
        for (let layer = 1; layer < layers; layer++) {
          expectWithinNoise(oracle, bf16ArrayToF32(await run(prompt, [layer], "hidden")), prompt, `hidden.${layer}`);
        }
        expectWithinNoise(oracle, bf16ArrayToF32(await run(prompt, [layers], "hidden")), prompt, "norm");
        expectWithinNoise(oracle, bf16ArrayToF32(await run(prompt, [layers], "all_logits")), prompt, "logits");
      }
    }, 120_000);

    test("gives the same bits wherever it is cut, and however its weights are", async () => {
      const whole = await run("full", [layers], "all_logits");
      for (const ends of splitsOf(layers)) {
        if (ends.length > 1)
          expect({ ends, bits: await run("full", ends, "all_logits") }).toEqual({ ends, bits: whole });
      }
      expect(await run("full", [layers], "all_logits", { maxBindingBytes: 2048 })).toEqual(whole);
    }, 120_000);

    test("gives the same bits in one call, in pieces, and token by token beside other sequences", async () => {
      const ids = idsOf("full");
      const whole = await run("full", [layers], "all_logits");
      const stage = await openFixture(device, folderOf(name), { maxContext: contextOf("full"), maxSessions: 4 });
      const inPieces = async (size: (piece: number) => number): Promise<Uint16Array> => {
        const session = await stage.open({ maxLength: ids.length, stay: "lasting" });
        const parts: number[] = [];
        for (let at = 0, piece = 0; at < ids.length; piece++) {
          const some = ids.slice(at, at + size(piece));
          const input = { kind: "ids", ids: some } as const;
          const output = await session.run({ input, positionStart: at, want: "all_logits" });
          if (output.kind !== "all_logits") throw new Error(`it gave ${output.kind}`);
          parts.push(...output.values);
          at += some.length;
        }
        session.close();
        return Uint16Array.from(parts);
      };
      const results = await Promise.all([
        inPieces(() => 1),
        inPieces(() => 11),
        inPieces((piece) => [3, 1, 30, 2][piece % 4]!),
      ]);
      for (const result of results) expect(result).toEqual(whole);
      stage.destroy();
      await device.reclaim();
    }, 120_000);
  });
});

describeOnDevices("a quantized family", ({ open, name: deviceName }) => {
  // Separate projections that share rows, with biases; fused ones; rows that hold q, k and v head by head. SwiftShader takes
  // ten seconds to compile what each of them needs.
  test.each(deviceName === "lavapipe" ? ["llama", "phi3", "gpt_neox"] : ["llama"])(
    "%s is near to itself in bfloat16, and gives the same bits wherever it is cut",
    async (name) => {
      const device = await open();
      const oracle = new Oracle(folderOf(name));
      const layers = layersIn(oracle, "short");
      const logits = async (encoding: "bf16" | "int8" | "nf4", ends: number[]) => {
        const stages: GpuStage[] = [];
        for (const [index, end] of ends.entries())
          stages.push(await openFixture(device, folderOf(name), { start: ends[index - 1] ?? 0, end, encoding }));
        const values = await bits(stages, idsInput(oracle.ints("full.input_ids")), "all_logits");
        for (const stage of stages) stage.destroy();
        await device.reclaim();
        return values;
      };
      const exact = bf16ArrayToF32(await logits("bf16", [layers]));
      const size = rmsDistance(exact, new Float32Array(exact.length));
      for (const [encoding, share] of [
        ["int8", 0.05],
        ["nf4", 0.5],
      ] as const) {
        const whole = await logits(encoding, [layers]);
        expect(await logits(encoding, [1, layers])).toEqual(whole);
        const distance = rmsDistance(bf16ArrayToF32(whole), exact) / size;
        if (process.env.SHOW) console.log(name, encoding, distance.toFixed(4));
        expect({ encoding, distance, isNear: distance < share }).toMatchObject({ isNear: true });
        expect(distance).toBeGreaterThan(share / 30); // or it was not quantized at all
      }
    },
    120_000,
  );
});

/** Every way to share the layers out, as the ends of the spans. */
const splitsOf = (layers: number): number[][] =>
  Array.from({ length: 2 ** (layers - 1) }, (_, mask) =>
    Array.from({ length: layers - 1 }, (__, i) => i + 1)
      .filter((cut) => mask & (1 << (cut - 1)))
      .concat(layers),
  );
