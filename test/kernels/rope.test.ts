import { afterAll, afterEach, beforeAll, describe, test } from "bun:test";
import { rope as kernel, WORKGROUP } from "../../src/kernels/index.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { rope } from "../../src/kernels/reference/rope.ts";
import { describeOnDevices } from "../support/device.ts";
import { absolute, Bench, expectSame, expectWithin, range, Sampler, U } from "./support.ts";

const POSITIONS = 50;

const CASES: { first: number; heads: number; headStride: number; pairs: number; interleaved?: boolean }[] = [
  { first: 0, heads: 1, headStride: 2, pairs: 1 },
  { first: 0, heads: 5, headStride: 20, pairs: 10 },
  { first: 0, heads: 3, headStride: 15, pairs: 3 }, // some dimensions of each head stay
  { first: 20, heads: 4, headStride: 60, pairs: 10 }, // the keys of rows that hold q, k and v head by head
  { first: 0, heads: 2, headStride: 256, pairs: 128 },
  { first: 9, heads: 3, headStride: 21, pairs: 5, interleaved: true }, // behind other dimensions of each head
];

describeOnDevices("rotary positions", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  describe.each(CASES)("$pairs pairs of $heads heads from column $first", (heads) => {
    const columns = heads.first + heads.heads * heads.headStride + 3;
    const run = async (x: Matrix, positions: number[], angles: Matrix): Promise<Matrix> => {
      const tensor = bench.input(x);
      const table = bench.input(angles);
      const constants = {
        HEADS: heads.heads,
        HEAD_STRIDE: heads.headStride,
        FIRST: heads.first,
        PAIRS: heads.pairs,
        INTERLEAVED: heads.interleaved ? 1 : 0,
        STRIDE: tensor.stride,
        ANGLE_STRIDE: table.stride,
        WORKGROUP,
      };
      const tokens = bench.input(
        positions.map((position) => [0x7fc17fc1, position]),
        "u32",
      );
      const dims = { rows: x.length, columns: heads.heads * heads.pairs };
      await bench.run(kernel, constants, { tokens, angles: table, x: tensor }, {}, dims);
      return bench.read(tensor);
    };

    test("are turned by the angles of each token's position, and all else stays", async () => {
      const sampler = new Sampler(heads.pairs);
      const x = sampler.f32(33, columns, 3);
      const angles = anglesOf(sampler, heads.pairs);
      const positions = x.map(() => sampler.integer(POSITIONS));
      const actual = await run(x, positions, angles);
      const expected = rope(x, positions, angles, heads, heads.interleaved);
      // Two products and their sum, each off by U, whether or not one of them is fused.
      const terms = rope(
        absolute(x),
        positions,
        absolute(angles).map((row) => row.map((value, i) => (i < heads.pairs ? value : -value))),
        heads,
        heads.interleaved,
      );
      const others = rope(absolute(x), positions, absolute(angles), heads, heads.interleaved);
      expectWithin(actual, expected, (row, column) =>
        expected[row]![column] === x[row]![column]
          ? 0
          : 1.01 * U * (Math.max(terms[row]![column]!, others[row]![column]!) + Math.abs(expected[row]![column]!)),
      );
      expectSame(await run(x.slice(7, 8), positions.slice(7, 8), angles), actual.slice(7, 8));
    });

    test("at angle zero stay as they are, to the bit", async () => {
      const x = new Sampler(1).f32(3, columns);
      const still = range(0, POSITIONS).map(() => range(0, 2 * heads.pairs).map((i) => (i < heads.pairs ? 1 : 0)));
      expectSame(await run(x, [0, 7, 49], still), x);
    });
  });
});

const anglesOf = (sampler: Sampler, pairs: number): number[][] =>
  range(0, POSITIONS).map(() => {
    const turns = range(0, pairs).map(() => sampler.normal() * 10);
    return [...turns.map(Math.cos), ...turns.map(Math.sin)].map(Math.fround);
  });
