import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { Device } from "../../src/gpu/device.ts";
import {
  dequantizeInt8,
  dequantizeNf4,
  type Nf4,
  quantizeInt8,
  quantizeNf4,
} from "../../src/kernels/reference/quantize.ts";
import { bf16ArrayToF32, f32ArrayToBf16 } from "../../src/quant/bf16.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES, Oracle } from "../support/oracle.ts";
import { safetensorsFile, type SourceTensor, temporaryFolder } from "../support/safetensors.ts";
import { bits, idsInput, openFixture, planFixture } from "../support/stages.ts";

// What a mixture of experts computes with weights of fewer bits is, to the bit, what it computes with bfloat16 weights that
// have the same values: those that bitsandbytes' code books give, made here by their plainest description.

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

const MODELS = ["qwen3_moe", "qwen2_moe", "deepseek_v3"];
const ENCODINGS = ["int8", "nf4"] as const;
const directoryOf = (name: string): string => join(FIXTURES, "families", name);

/** Rows of a bfloat16 tensor of a fixture, read without the loader. */
function tensorsOf(
  name: string,
): Map<string, { rows: number[][]; shape: readonly number[]; bytes: Uint8Array; dtype: string }> {
  const file = readFileSync(join(directoryOf(name), "model.safetensors"));
  const { tensors } = openCheckpoint(directoryOf(name));
  return new Map(
    [...tensors].map(([key, { begin, end, shape, dtype }]) => {
      const bytes = Uint8Array.from(file.subarray(begin, end));
      const columns = shape.at(-1) ?? 1;
      const values = dtype === "BF16" ? bf16ArrayToF32(new Uint16Array(bytes.buffer)) : new Float32Array(0);
      const rows = Array.from({ length: values.length / columns }, (_, row) =>
        Array.from(values.subarray(row * columns, (row + 1) * columns)),
      );
      return [key, { rows, shape, bytes, dtype }];
    }),
  );
}

const bf16Bytes = (rows: number[][]): Uint8Array =>
  new Uint8Array(f32ArrayToBf16(Float32Array.from(rows.flat())).buffer);

let copies = 0;
const isRouter = (key: string): boolean => key.endsWith("mlp.gate.weight");
const asBf16 = (key: string, rows: number[][]): Record<string, SourceTensor> => ({
  [key]: { dtype: "BF16", shape: [rows.length, rows[0]!.length], data: bf16Bytes(rows) },
});

/** Writes a copy of a fixture in which `change` has put other tensors in the place of routers and of the weights that have fewer bits. */
function writeCopy(
  name: string,
  encoding: (typeof ENCODINGS)[number],
  change: (key: string, rows: number[][]) => Record<string, SourceTensor>,
  config: Record<string, unknown> = {},
): string {
  const directory = join(folder.path, `${name}-${encoding}-${copies++}`);
  mkdirSync(directory, { recursive: true });
  const json = JSON.parse(readFileSync(join(directoryOf(name), "config.json"), "utf8"));
  writeFileSync(join(directory, "config.json"), JSON.stringify({ ...json, ...config }));
  const planned = new Map(
    planFixture(directoryOf(name), { encoding }).plan.weights.map((weight) => [weight.source.name, weight]),
  );
  const tensors: Record<string, SourceTensor> = {};
  for (const [key, { rows, shape, bytes, dtype }] of tensorsOf(name)) {
    const weight = planned.get(key);
    if (weight?.encoding === encoding || isRouter(key)) Object.assign(tensors, change(key, rows));
    else tensors[key] = { dtype, shape: [...shape], data: bytes };
  }
  writeFileSync(join(directory, "model.safetensors"), safetensorsFile(tensors));
  return directory;
}

/** Routers have fewer bits only where a checkpoint has. */
const dequantized = (name: string, encoding: (typeof ENCODINGS)[number], { routersToo = false } = {}): string =>
  writeCopy(name, encoding, (key, rows) => {
    if (isRouter(key) && !routersToo) return asBf16(key, rows);
    return asBf16(key, encoding === "int8" ? dequantizeInt8(quantizeInt8(rows)) : dequantizeNf4(quantizeNf4(rows)));
  });

/** SwiftShader compiles kernels for minutes; the long tests give it those. */
const isSlow = (deviceName: string) => deviceName === "SwiftShader" && !process.env.LONG_TESTS;

describeOnDevices("experts in fewer bits", ({ open, name: deviceName }) => {
  let device: Device;
  beforeAll(async () => void (device = await open()));

  const logitsOf = async (directory: string, name: string, range: Parameters<typeof openFixture>[2] = {}) => {
    const stage = await openFixture(device, directory, range);
    try {
      const ids = new Oracle(directoryOf(name)).ints("full.input_ids");
      return [
        await bits([stage], idsInput(ids), "all_logits"),
        await bits([stage], idsInput(ids.slice(0, 3)), "all_logits"),
      ];
    } finally {
      stage.destroy();
      await device.reclaim();
    }
  };

  describe.each(MODELS.slice(isSlow(deviceName) ? -1 : 0))("of %s", (name) => {
    test.each(ENCODINGS)(
      "(%s) are those with the values of its codes, however they are split",
      async (encoding) => {
        const expected = await logitsOf(dequantized(name, encoding), name);
        expect(await logitsOf(directoryOf(name), name, { encoding })).toEqual(expected);
        expect(await logitsOf(directoryOf(name), name, { encoding, maxBindingBytes: 1024 })).toEqual(expected);
        expect(expected).not.toEqual(await logitsOf(directoryOf(name), name));
      },
      240_000,
    );
  });

  test("take the memory that the plan says", async () => {
    for (const encoding of ENCODINGS) {
      const plain = await openFixture(device, directoryOf("qwen3_moe"));
      const stage = await openFixture(device, directoryOf("qwen3_moe"), { encoding });
      const [before, after] = [
        planFixture(directoryOf("qwen3_moe")),
        planFixture(directoryOf("qwen3_moe"), { encoding }),
      ];
      expect(plain.allocatedBytes - stage.allocatedBytes).toBe(before.plan.deviceBytes - after.plan.deviceBytes);
      for (const one of [plain, stage]) one.destroy();
      await device.reclaim();
    }
  }, 60_000);

  test("that a checkpoint keeps one by one in NF4, with their routers, as transformers 4 saved them, are taken as they are", async () => {
    const stored = writeCopy("qwen3_moe", "nf4", (key, rows) => storedNf4(key, quantizeNf4(rows)), {
      quantization_config: { quant_method: "bitsandbytes", load_in_4bit: true, bnb_4bit_quant_type: "nf4" },
    });
    const expected = await logitsOf(dequantized("qwen3_moe", "nf4", { routersToo: true }), "qwen3_moe");
    expect(await logitsOf(stored, "qwen3_moe")).toEqual(expected);
  }, 60_000);
});

/** As bitsandbytes saves a weight: the first code of a byte in its high half. */
function storedNf4(key: string, { codes, absmax }: Nf4): Record<string, SourceTensor> {
  const flat = codes.flat();
  const bytes = Uint8Array.from(
    { length: Math.ceil(flat.length / 2) },
    (_, i) => (flat[2 * i]! << 4) | (flat[2 * i + 1] ?? 0),
  );
  const state = new TextEncoder().encode(
    JSON.stringify({ quant_type: "nf4", blocksize: 64, dtype: "bfloat16", shape: [codes.length, codes[0]!.length] }),
  );
  return {
    [key]: { dtype: "U8", shape: [bytes.length, 1], data: bytes },
    [`${key}.absmax`]: {
      dtype: "F32",
      shape: [absmax.length],
      data: new Uint8Array(Float32Array.from(absmax).buffer),
    },
    [`${key}.quant_state.bitsandbytes__nf4`]: { dtype: "U8", shape: [state.length], data: state },
  };
}

describe("experts that cannot lie together", () => {
  test("stay in bfloat16 where blocks of 64 do not end with an expert", () => {
    const directory = directoryOf("mixtral"); // 36 × 22
    const { plan } = planFixture(directory, { encoding: "nf4" });
    const encodings = Map.groupBy(plan.weights, ({ source }) => source.name.includes("experts"));
    expect(new Set(encodings.get(true)!.map(({ encoding }) => encoding))).toEqual(new Set(["bf16"]));
    const { plan: int8 } = planFixture(directory, { encoding: "int8" });
    const some = int8.weights.find(({ source }) => source.name.includes("experts"))!;
    expect(some.encoding).toBe("int8");
  });

  test("are refused by name where a checkpoint has some of them in NF4 and some not", () => {
    const directory = writeCopy(
      "qwen3_moe",
      "nf4",
      (key, rows) => (key.endsWith("experts.2.up_proj.weight") ? asBf16(key, rows) : storedNf4(key, quantizeNf4(rows))),
      { quantization_config: { quant_method: "bitsandbytes", load_in_4bit: true, bnb_4bit_quant_type: "nf4" } },
    );
    expect(() => planFixture(directory)).toThrow(
      /layers\.1\.mlp\.experts\.2\.up_proj\.weight is bf16, and .*experts\.0\.up_proj\.weight is nf4/,
    );
  });
});
