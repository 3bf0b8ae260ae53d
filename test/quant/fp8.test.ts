import { expect, test } from "bun:test";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { roundBf16 } from "../../src/kernels/reference/bf16.ts";
import { bf16ArrayToF32 } from "../../src/quant/bf16.ts";
import { E4M3, fp8ToBf16 } from "../../src/quant/fp8.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { findBlockScales } from "../../src/weights/fp8.ts";
import { safetensorsFile, seededRandom, temporaryFolder } from "../support/safetensors.ts";

test("a code of E4M3 has the value that torch gives it", () => {
  expect([0x00, 0x01, 0x07, 0x08, 0x38, 0x39, 0x7e, 0x80, 0xb8, 0xfe].map((code) => E4M3[code]!)).toEqual([
    0, 0.001953125, 0.013671875, 0.015625, 1, 1.125, 448, -0, -1, -448,
  ]);
  expect([E4M3[0x7f], E4M3[0xff]]).toEqual([NaN, NaN]);
  expect([...E4M3].filter(Number.isNaN)).toHaveLength(2);
});

test("a value is that of its code times its block's factor, rounded once, also in blocks that are not whole", () => {
  const [rows, columns, stride] = [300, 261, 264];
  const random = seededRandom(1);
  const codes = Uint8Array.from({ length: rows * columns }, () => {
    const code = Math.floor(random() * 256);
    return (code & 0x7f) === 0x7f ? 0 : code;
  });
  const factors = Float32Array.from({ length: 3 * 3 }, random);
  const expected = Array.from(codes, (code, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns];
    return roundBf16(Math.fround(E4M3[code]! * factors[Math.floor(row / 128) * 3 + Math.floor(column / 128)]!));
  });

  for (const [first, end] of [
    [0, 300],
    [100, 140], // across the end of a block
    [299, 300],
  ] as const) {
    const target = new Uint16Array((end - first) * stride);
    const some = codes.subarray(first * columns, end * columns);
    fp8ToBf16(some, { firstRow: first, columns, stride }, factors, target);
    const values = bf16ArrayToF32(target);
    for (let row = first; row < end; row++) {
      const at = (row - first) * stride;
      expect([...values.subarray(at, at + columns)]).toEqual(expected.slice(row * columns, (row + 1) * columns));
      expect([...values.subarray(at + columns, at + stride)]).toEqual([0, 0, 0]);
    }
  }
});

test("factors that are missing, or not one for each block, are refused by name", () => {
  using folder = temporaryFolder();
  const spec = {
    names: ["w"],
    kind: "matrix",
    rows: 200,
    columns: 100,
    storedTransposed: false,
    quantizable: true,
    gathered: false,
  } as const;
  const find = (name: string, scales?: { dtype: string; shape: number[] }) => {
    const directory = join(folder.path, name);
    mkdirSync(directory);
    const numbers = scales?.shape.reduce((product, size) => product * size, 1) ?? 0;
    const file = safetensorsFile({
      w: { dtype: "F8_E4M3", shape: [200, 100], data: new Uint8Array(20_000) },
      ...(scales && { w_scale_inv: { ...scales, data: new Uint8Array(numbers * (scales.dtype === "F32" ? 4 : 2)) } }),
    });
    writeFileSync(join(directory, "model.safetensors"), file);
    const checkpoint = openCheckpoint(directory);
    return findBlockScales(spec, checkpoint.tensors.get("w")!, checkpoint);
  };
  expect(find("right", { dtype: "F32", shape: [2, 1] })?.name).toBe("w_scale_inv");
  expect(() => find("none")).toThrow(/w_scale_inv is missing, not F32 \[2, 1\]/);
  expect(() => find("few", { dtype: "F32", shape: [1, 1] })).toThrow(/is F32 \[1, 1\], not F32 \[2, 1\]/);
  expect(() => find("half", { dtype: "BF16", shape: [2, 1] })).toThrow(UserError);
});
