import { describe, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { readHeader } from "../../src/safetensors/header.ts";
import { describeOnDevices } from "../support/device.ts";
import { FIXTURES, Oracle, rmsDistance } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { floats, idsInput, openFixture } from "../support/stages.ts";

/** Saved by transformers with bitsandbytes: see `test/fixtures/README.md`. */
const checkpoint = (name: string): string => join(FIXTURES, "bnb/checkpoints", name);

describeOnDevices("a checkpoint that bitsandbytes has quantized", ({ open }) => {
  test.each(["nf4", "nf4-nested", "nf4-odd", "nf4-untied", "fp4", "int8"])(
    "is loaded with its own codes: %s",
    async (name) => {
      const device = await open();
      const oracle = new Oracle(checkpoint(name));
      const stage = await openFixture(device, checkpoint(name));
      for (const prompt of ["short", "full"]) {
        const logits = await floats([stage], idsInput(oracle.ints(`${prompt}.input_ids`)), "all_logits");
        const fp32 = oracle.floats(`${prompt}.dequant_fp32.logits`);
        const bf16 = oracle.floats(`${prompt}.dequant_bf16.logits`);
        const noise = rmsDistance(bf16, fp32);
        const [toFp32, toBf16] = [rmsDistance(logits, fp32), rmsDistance(logits, bf16)];
        expect({
          prompt,
          nearFp32: toFp32 <= 1.5 * noise,
          nearBf16: toBf16 <= 2 * noise,
          toFp32,
          toBf16,
          noise,
        }).toMatchObject({
          nearFp32: true,
          nearBf16: true,
        });
      }
      stage.destroy();
    },
    60_000,
  );
});

describeOnDevices("a damaged one is refused by name:", ({ open }) => {
  const C_ATTN = "transformer.h.0.attn.c_attn.weight";

  test.each([
    [
      "a state that is cut",
      "nf4",
      `${C_ATTN}.quant_state.bitsandbytes__nf4`,
      (b: Uint8Array) => b.fill(0x20, 40),
      /quant_state.*is not JSON/,
    ],
    [
      "another block size",
      "nf4",
      `${C_ATTN}.quant_state.bitsandbytes__nf4`,
      (b: Uint8Array) => replace(b, '"blocksize": 64', '"blocksize": 32'),
      /blocksize 32.*64/,
    ],
    [
      "another shape",
      "nf4",
      `${C_ATTN}.quant_state.bitsandbytes__nf4`,
      (b: Uint8Array) => replace(b, "[300, 100]", "[100, 300]"),
      /shape \[100,300\].*\[300,100\]/,
    ],
    [
      "another type",
      "nf4",
      `${C_ATTN}.quant_state.bitsandbytes__nf4`,
      (b: Uint8Array) => replace(b, '"nf4"', '"fp4"'),
      /quant_type "fp4".*"nf4"/,
    ],
    [
      "another layout",
      "int8",
      "transformer.h.0.attn.c_attn.weight_format",
      (b: Uint8Array) => b.fill(2),
      /weight_format is 2/,
    ],
  ] as const)("%s", async (_, name, tensor, damage, says) => {
    using folder = temporaryFolder();
    cpSync(checkpoint(name), folder.path, { recursive: true });
    const path = join(folder.path, "model.safetensors");
    const file = readFileSync(path);
    const { begin, end } = readHeader(path).get(tensor)!;
    damage(file.subarray(begin, end));
    writeFileSync(path, file);
    expect(openFixture(await open(), folder.path)).rejects.toThrow(says);
  });
});

describe("what belongs to a quantized weight", () => {
  test.each([
    [
      "absmax",
      "nf4",
      "c_attn.weight.absmax",
      "c_attn.weight.absent",
      /c_attn.weight is quantized, and .*absmax is missing/,
    ],
    [
      "its nested absmax",
      "nf4-nested",
      "c_attn.weight.nested_absmax",
      "c_attn.weight.nested_absent",
      /nested_absmax and nested_quant_map is missing/,
    ],
    [
      "its state",
      "fp4",
      "c_attn.weight.quant_state.bitsandbytes__fp4",
      "c_attn.weight.quant_state.bitsandbytes__fp5",
      /c_attn.weight is U8/,
    ],
    ["SCB", "int8", "c_attn.SCB", "c_attn.SCA", /c_attn.weight is I8/],
  ])("is missed by name: %s", async (_, name, from, to, says) => {
    using folder = temporaryFolder();
    cpSync(checkpoint(name), folder.path, { recursive: true });
    const path = join(folder.path, "model.safetensors");
    const file = readFileSync(path);
    replace(file, `h.0.attn.${from}"`, `h.0.attn.${to}"`);
    writeFileSync(path, file);
    // The plan says so, before there is a device.
    expect(openFixture(undefined as never, folder.path)).rejects.toThrow(says);
  });
});

/** In place, by text of the same length or shorter. */
function replace(bytes: Uint8Array, from: string, to: string): void {
  const at = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length).indexOf(from);
  if (at < 0) throw new Error(`no ${from}`);
  bytes.set(new TextEncoder().encode(to.padEnd(from.length)), at);
}
