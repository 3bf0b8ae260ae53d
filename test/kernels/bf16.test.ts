import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { add, packBf16, unpackBf16, WORKGROUP } from "../../src/kernels/index.ts";
import { add as addReference } from "../../src/kernels/reference/add.ts";
import {
  bf16OfBits,
  packBf16 as packReference,
  unpackBf16 as unpackReference,
} from "../../src/kernels/reference/bf16.ts";
import { type Matrix, matrixOf } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, range, Sampler, SMALLEST_NORMAL } from "./support.ts";

/** Below, at and above the tie between two bfloat16 values, and the ends. */
const LOWER_HALVES = [0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff];

/** Every float32 with one of these lower halves: [6 · 64, 1024]. */
const PATTERNS: Float32Array[] = LOWER_HALVES.flatMap((low) =>
  range(0, 64).map((block) => {
    const bits = Uint32Array.from({ length: 1024 }, (_, i) => ((block * 1024 + i) << 16) | low);
    return new Float32Array(bits.buffer);
  }),
);

describeOnDevices("rounding to bfloat16", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  const runAdd = async (x: Matrix, y: Matrix, round: boolean): Promise<Matrix> => {
    const bindings = { x: bench.input(x), y: bench.input(y) };
    const { stride } = bindings.y;
    const constants = { STRIDE: stride, ROUND: round ? 1 : 0, WORKGROUP };
    await bench.run(add, constants, bindings, {}, { rows: x.length, columns: stride });
    return bench.read(bindings.y);
  };

  /** The 16-bit patterns of all values, as they would leave the device. */
  const pack = async (x: Matrix): Promise<Uint16Array> => {
    const columns = x[0]!.length;
    const count = x.length * columns;
    const input = bench.input(x);
    const y = bench.output(1, Math.ceil(count / 2), "u32");
    const constants = { COLUMNS: columns, STRIDE: input.stride, WORKGROUP };
    await bench.run(packBf16, constants, { x: input, y }, { count }, { count });
    const words = (await bench.read(y))[0] as Uint32Array;
    const halves = new Uint16Array(words.slice().buffer);
    if (count % 2 === 1) expect(halves[count]).toBe(0); // the half behind the last value
    return halves.subarray(0, count);
  };

  const unpack = async (bits: Uint16Array, rows: number, columns: number): Promise<Matrix> => {
    const even = new Uint16Array(bits.length + (bits.length % 2));
    even.set(bits);
    const bindings = { x: bench.input([new Uint32Array(even.buffer)], "u32"), y: bench.output(rows, columns) };
    const constants = { COLUMNS: columns, STRIDE: bindings.y.stride, WORKGROUP };
    await bench.run(unpackBf16, constants, bindings, {}, { rows, columns });
    return bench.read(bindings.y);
  };

  describe("of every upper half with lower halves about the tie:", () => {
    test("a value that leaves the device is the nearest, ties to even, and NaN stays NaN", async () => {
      const actual = await pack(PATTERNS);
      const expected = packReference(PATTERNS);
      const sources = PATTERNS.flatMap((row) => Array.from(new Uint32Array(row.buffer)));
      const wrong = expected.findIndex((bits, i) => {
        const source = sources[i]!;
        // A quiet NaN of the same sign: the first bit of its fraction set.
        const isNaN = (source & 0x7fffffff) > 0x7f800000;
        return actual[i] !== (isNaN ? (source >>> 16) | 0x40 : bits);
      });
      expect(wrong < 0 ? undefined : { source: sources[wrong], actual: actual[wrong] }).toBeUndefined();
    });

    test("a sum that is rounded is the nearest, ties to even, and NaN stays NaN", async () => {
      const zeros = PATTERNS.map((row) => new Float32Array(row.length));
      const actual = await runAdd(PATTERNS, zeros, true);
      const expected = addReference(PATTERNS, zeros, true);
      const isSubnormal = (row: number, column: number) => Math.abs(PATTERNS[row]![column]!) < SMALLEST_NORMAL;
      const allowed = expected.map((sums, row) =>
        sums.map((sum, column) => {
          const is = actual[row]![column]!;
          return is === 0 && isSubnormal(row, column) ? is : sum; // a device may take a subnormal operand for zero
        }),
      );
      expectSame(actual, allowed);
    });
  });

  test.each([1, 7, 8, 33, 100])("a residual of %d columns is y + x, rounded or not", async (columns) => {
    const sampler = new Sampler(columns);
    for (const rows of [1, 3, 33]) {
      const [x, y] = [sampler.f32(rows, columns), sampler.f32(rows, columns)];
      for (const round of [false, true]) expectSame(await runAdd(x, y, round), addReference(x, y, round));
    }
  });

  test.each([
    { rows: 1, columns: 1 },
    { rows: 3, columns: 7 }, // words that span two rows, and half a word at the end
    { rows: 4, columns: 33 },
    { rows: 65, columns: 100 },
    { rows: 31, columns: 768 },
  ])("$rows rows of $columns columns enter and leave the device unpadded", async ({ rows, columns }) => {
    const x = new Sampler(columns).f32(rows, columns);
    const packed = await pack(x);
    expect([...packed]).toEqual(packReference(x));
    const unpacked = await unpack(packed, rows, columns);
    expectSame(unpacked, unpackReference(packed, rows, columns));
    expect(await pack(unpacked)).toEqual(packed);
  });

  test("every bfloat16 enters the device with the value its bits say", async () => {
    const bits = Uint16Array.from({ length: 65536 }, (_, i) => i);
    expectSame(
      await unpack(bits, 64, 1024),
      matrixOf(64, 1024, (row, column) => bf16OfBits(row * 1024 + column)),
    );
  });

  test("more values leave the device than one line of workgroups takes", async () => {
    const columns = 2048;
    const rows = (32768 * WORKGROUP * 2) / columns + 1;
    const row = new Sampler(2).bf16(1, columns)[0]!;
    const line = Float32Array.from(row);
    const expected = packReference([line]);
    const packed = await pack(range(0, rows).map((r) => (r % 2 === 0 ? line : line.map((v) => -v))));
    for (const r of [0, 1, rows - 2, rows - 1]) {
      const sign = r % 2 === 0 ? 0 : 0x8000;
      expect([...packed.subarray(r * columns, (r + 1) * columns)]).toEqual(expected.map((bits) => bits ^ sign));
    }
  });
});
