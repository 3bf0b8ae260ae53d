import { afterAll, afterEach, beforeAll, expect, test } from "bun:test";
import { strideOf } from "../../src/gpu/tensor.ts";
import { argmax as kernel, NOT_A_TOKEN } from "../../src/kernels/index.ts";
import { argmax } from "../../src/kernels/reference/argmax.ts";
import { type Matrix, matrixOf } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, range, Sampler } from "./support.ts";

const COLUMNS = [1, 7, 8, 33, 100, 128, 129, 1000]; // fewer than lanes, as many, one more, several for each

describeOnDevices("the best token", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  const run = async (x: Matrix): Promise<number[]> => {
    const columns = x[0]!.length;
    const token = bench.output(x.length, 1, "u32");
    const constants = { COLUMNS: columns, STRIDE: strideOf(columns, "f32"), WORKGROUP: 128 };
    await bench.run(kernel, constants, { x: bench.input(x), token }, {}, { rows: x.length });
    return (await bench.read(token)).map((row) => row[0]!);
  };

  test.each(COLUMNS)("of %d is the largest value, the lowest column among equals", async (columns) => {
    const sampler = new Sampler(columns);
    const rows = [
      ...sampler.f32(31, columns),
      ...sampler.f32(3, columns).map((row) => row.map((value) => -Math.abs(value) - 1)), // below the padding's zeros
      ...matrixOf(31, columns, () => sampler.integer(3)), // many ties
      ...[0, -1, Infinity, -Infinity, 3.4e38, 1e-45].map((value) => range(0, columns).map(() => value)), // all equal
    ];
    const answers = await run(rows);
    expect(answers).toEqual(argmax(rows, NOT_A_TOKEN));
    expect(answers.slice(-6)).toEqual([0, 0, 0, 0, 0, 0]);
  });

  test("is found at any column, and in any row alike", async () => {
    const rows = range(0, 129).map((best) => range(0, 129).map((column) => (column === best ? 1 : -column)));
    expect(await run(rows)).toEqual(range(0, 129));
    expect(await run(rows.slice(100, 103))).toEqual([100, 101, 102]);
  });

  test("is the lower of two equals whichever lanes have them", async () => {
    const pairs = range(0, 129).map((first) => [first, (first + 70) % 129]);
    const rows = pairs.map((pair) => range(0, 129).map((column) => (pair.includes(column) ? 5 : 0)));
    expect(await run(rows)).toEqual(pairs.map((pair) => Math.min(...pair)));
  });

  test("takes -0 for +0, and subnormals for what they are", async () => {
    const rows = [
      [-0, 0, -1],
      [0, -0, -1],
      [-1, -0, 0],
      [0, 1e-45, -1],
      [-1e-45, -0, -1],
    ].map((row) => [...row, ...range(3, 33).map(() => -2)]);
    expect(await run(rows)).toEqual([0, 0, 1, 1, 1]);
  });

  test("may be an infinity, and -infinity only where there is nothing else", async () => {
    const row = (values: Record<number, number>, fill: number) => range(0, 129).map((column) => values[column] ?? fill);
    const rows = [row({ 128: Infinity, 3: 3.4e38 }, 0), row({ 100: -3.4e38 }, -Infinity), row({ 0: -Infinity }, -1)];
    expect(await run(rows)).toEqual([128, 100, 1]);
  });

  test.each([0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff])(
    "is refused where any value of the row is NaN, whatever its bits (%d), and only there",
    async (nan) => {
      const rows = [0, 1, 64, 127, 128].map((place) => withBits(range(0, 129), place, nan));
      rows.splice(2, 0, Float32Array.from(range(0, 129)));
      rows.push(withBits(Array<number>(129).fill(Infinity), 5, nan));
      const none = NOT_A_TOKEN;
      expect(await run(rows)).toEqual([none, none, 128, none, none, none, none]);
    },
  );
});

/** The row with a float32 of these bits at one place. */
function withBits(row: readonly number[], place: number, bits: number): Float32Array {
  const values = Float32Array.from(row);
  new Uint32Array(values.buffer)[place] = bits;
  return values;
}
