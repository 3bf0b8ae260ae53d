import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { embed as kernel, embedTokens as tokensKernel, WORKGROUP } from "../../src/kernels/index.ts";
import { embed, embedTokens } from "../../src/kernels/reference/embed.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, isUnwritten, range, Sampler } from "./support.ts";

const VOCABULARY = 50;
const POSITIONS = 40;

describeOnDevices("an embedding", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  interface Case {
    tokens: { id: number; position: number }[];
    tokenTable: Matrix;
    positionTable: Matrix;
  }

  const makeCase = (rows: number, columns: number): Case => {
    const sampler = new Sampler(rows * 1000 + columns);
    return {
      tokens: range(0, rows).map(() => ({ id: sampler.integer(VOCABULARY), position: sampler.integer(POSITIONS) })),
      tokenTable: sampler.bf16(VOCABULARY, columns),
      positionTable: sampler.bf16(POSITIONS, columns, 0.1),
    };
  };

  /** `parts`, `positionParts`: where each part of a table begins. */
  const run = async (
    { tokens, tokenTable, positionTable }: Case,
    parts = [0],
    end = VOCABULARY,
    positionParts = [0],
  ): Promise<Matrix> => {
    const y = bench.output(tokens.length, tokenTable[0]!.length);
    const table = bench.input(
      tokens.map(({ id, position }) => [id, position]),
      "u32",
    );
    for (const [index, first_id] of parts.entries()) {
      const part = tokenTable.slice(first_id, parts[index + 1] ?? end);
      for (const [at, first_position] of positionParts.entries()) {
        const positions = positionTable.slice(first_position, positionParts[at + 1]);
        const tables = { token_table: bench.input(part, "bf16"), position_table: bench.input(positions, "bf16") };
        const dims = { rows: tokens.length, columns: y.stride };
        const params = { first_id, ids: part.length, first_position, positions: positions.length };
        await bench.run(kernel, { STRIDE: y.stride, WORKGROUP }, { tokens: table, ...tables, y }, params, dims);
      }
    }
    return bench.read(y);
  };

  test.each([1, 7, 8, 33, 100, 129, 768])(
    "of %d columns is token plus position, rounded to bfloat16",
    async (columns) => {
      for (const rows of [1, 3, 33]) {
        const { tokens, tokenTable, positionTable } = makeCase(rows, columns);
        expectSame(await run({ tokens, tokenTable, positionTable }), embed(tokens, tokenTable, positionTable));
      }
    },
  );

  test("is the same when its tables lie in several parts", async () => {
    const whole = makeCase(65, 100);
    expectSame(await run(whole, [0, 1, 17, 49]), await run(whole));
    expectSame(await run(whole, [0, 17], VOCABULARY, [0, 3, 20]), await run(whole));
  });

  test("leaves tokens alone whose row is in another part", async () => {
    const whole = makeCase(65, 100);
    const expected = await run(whole);
    const actual = await run(whole, [10], 30);
    for (const [index, { id }] of whole.tokens.entries()) {
      if (id >= 10 && id < 30) expect(actual[index]).toEqual(expected[index]!);
      else expect(Array.from(actual[index]!).every(isUnwritten)).toBe(true);
    }
  });

  describe.each([1, 45.25])("without positions, times %d,", (scale) => {
    const runTokens = async (ids: number[], table: Matrix, parts = [0]): Promise<Matrix> => {
      const y = bench.output(ids.length, table[0]!.length);
      const tokens = bench.input(
        ids.map((id) => [id, 0x7fc17fc1]),
        "u32",
      );
      for (const [index, first_id] of parts.entries()) {
        const part = table.slice(first_id, parts[index + 1]);
        const bindings = { tokens, token_table: bench.input(part, "bf16"), y };
        const dims = { rows: ids.length, columns: y.stride };
        const constants = { STRIDE: y.stride, SCALE: scale, WORKGROUP };
        await bench.run(tokensKernel, constants, bindings, { first_id, ids: part.length }, dims);
      }
      return bench.read(y);
    };

    test.each([1, 7, 100, 768])("of %d columns is the token's row, rounded to bfloat16", async (columns) => {
      const { tokens, tokenTable } = makeCase(33, columns);
      const ids = tokens.map(({ id }) => id);
      const expected = embedTokens(ids, tokenTable, scale);
      expectSame(await runTokens(ids, tokenTable), expected);
      expectSame(await runTokens(ids, tokenTable, [0, 1, 17, 49]), expected);
    });
  });
});
