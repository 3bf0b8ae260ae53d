import type { Device } from "../../gpu/device.ts";
import { strideOf } from "../../gpu/tensor.ts";
import {
  ACTIVATIONS,
  type Activation,
  activation,
  add,
  argmax,
  embed,
  embedTokens,
  gatedActivation,
  gatherRows,
  headNorm,
  layerNorm,
  NOT_A_TOKEN,
  packBf16,
  rmsNorm,
  rope,
  softcap,
  transposeBf16,
  unpackBf16,
  WORKGROUP,
} from "../../kernels/index.ts";
import { activation as activationReference } from "../../kernels/reference/activation.ts";
import { add as addReference } from "../../kernels/reference/add.ts";
import { argmax as argmaxReference } from "../../kernels/reference/argmax.ts";
import { bitsOfBf16, packBf16 as packReference, unpackBf16 as unpackReference } from "../../kernels/reference/bf16.ts";
import { embed as embedReference, embedTokens as tokensReference } from "../../kernels/reference/embed.ts";
import { gatherRows as gatherReference } from "../../kernels/reference/gather-rows.ts";
import { layerNorm as layerNormReference } from "../../kernels/reference/layer-norm.ts";
import { matrixOf } from "../../kernels/reference/matrix.ts";
import { headNorm as headReference, rmsNorm as rmsReference } from "../../kernels/reference/rms-norm.ts";
import { rope as ropeReference } from "../../kernels/reference/rope.ts";
import { softcap as softcapReference } from "../../kernels/reference/softcap.ts";
import { transpose } from "../../kernels/reference/transpose-bf16.ts";
import type { Bench } from "./bench.ts";
import { Sampler } from "./sampler.ts";
import { type SelfTest, selfTest } from "./self-test.ts";
import { sameAs, within } from "./verdict.ts";

// Kernels that treat each value or each row on its own. 5 rows of 75 columns: no multiple of anything.
const ROWS = 5;
const COLUMNS = 75;
/** Functions that WGSL promises a few units in the last place of. */
const CLOSE = 1e-5;

/** Three heads of 15 from column 7 on, 20 columns apart. */
const HEADS = { first: 7, heads: 3, headStride: 20, headDim: 15 };

const REDUCTIONS = ["subgroups", "workgroup"] as const;
const byReduction = (variant: (typeof REDUCTIONS)[number]) => ({
  variant,
  missing: ({ hasSubgroups }: Device) =>
    variant === "subgroups" && !hasSubgroups ? "this device has no subgroups" : undefined,
});

export const ROW_TESTS: readonly SelfTest[] = [
  selfTest(activation, async (bench, kernel) => {
    const values = new Sampler(1).f32(ROWS, COLUMNS, 3);
    for (const name of Object.keys(ACTIVATIONS) as Activation[]) {
      const x = bench.input(values);
      const constants = { STRIDE: x.stride, ACTIVATION: ACTIVATIONS[name], WORKGROUP };
      await bench.run(kernel, constants, { x }, {}, { rows: ROWS, columns: x.stride });
      const expected = values.map((row) => row.map((value) => activationReference(name, value)));
      const wrong = within(await bench.read(x), expected, CLOSE);
      if (wrong) return `${name}: ${wrong}`;
    }
    return undefined;
  }),

  selfTest(gatedActivation, async (bench, kernel) => {
    const sampler = new Sampler(10);
    const [gates, ups] = [sampler.f32(ROWS, COLUMNS, 3), sampler.f32(ROWS, COLUMNS)];
    const x = bench.input(gates.map((row, i) => [...row, ...ups[i]!]));
    const y = bench.output(ROWS, COLUMNS);
    const constants = { COLUMNS, STRIDE: x.stride, STRIDE_OUT: y.stride, ACTIVATION: ACTIVATIONS.silu, WORKGROUP };
    await bench.run(kernel, constants, { x, y }, {}, { rows: ROWS, columns: COLUMNS });
    const expected = gates.map((row, i) => row.map((gate, k) => activationReference("silu", gate) * ups[i]![k]!));
    return within(await bench.read(y), expected, CLOSE);
  }),

  selfTest(add, async (bench, kernel) => {
    const sampler = new Sampler(2);
    const [left, right] = [sampler.f32(ROWS, COLUMNS), sampler.f32(ROWS, COLUMNS)];
    const [x, y] = [bench.input(left), bench.input(right)];
    const constants = { STRIDE: y.stride, ROUND: 1, WORKGROUP };
    await bench.run(kernel, constants, { x, y }, {}, { rows: ROWS, columns: y.stride });
    return sameAs(await bench.read(y), addReference(left, right, true));
  }),

  selfTest(argmax, async (bench, kernel) => {
    const sampler = new Sampler(3);
    const x = [...sampler.f32(ROWS, 300), ...matrixOf(ROWS, 300, () => sampler.integer(3))]; // many ties
    x[1]![250] = NaN;
    const token = bench.output(x.length, 1, "u32");
    const constants = { COLUMNS: 300, STRIDE: strideOf(300, "f32"), WORKGROUP: 128 };
    await bench.run(kernel, constants, { x: bench.input(x), token }, {}, { rows: x.length });
    return sameAs(
      await bench.read(token),
      argmaxReference(x, NOT_A_TOKEN).map((best) => [best]),
    );
  }),

  selfTest(embed, async (bench, kernel) => {
    const sampler = new Sampler(4);
    const [tokenTable, positionTable] = [sampler.bf16(20, COLUMNS), sampler.bf16(10, COLUMNS, 0.1)];
    const tokens = matrixOf(ROWS, 2, (_, column) => sampler.integer(column === 0 ? 20 : 10));
    const y = bench.output(ROWS, COLUMNS);
    const bindings = {
      tokens: bench.input(tokens, "u32"),
      token_table: bench.input(tokenTable, "bf16"),
      position_table: bench.input(positionTable, "bf16"),
      y,
    };
    const params = { first_id: 0, ids: 20, first_position: 0, positions: 10 };
    await bench.run(kernel, { STRIDE: y.stride, WORKGROUP }, bindings, params, { rows: ROWS, columns: y.stride });
    const named = tokens.map(([id, position]) => ({ id: id!, position: position! }));
    return sameAs(await bench.read(y), embedReference(named, tokenTable, positionTable));
  }),

  selfTest(embedTokens, async (bench, kernel) => {
    const sampler = new Sampler(11);
    const table = sampler.bf16(20, COLUMNS);
    const ids = Array.from({ length: ROWS }, () => sampler.integer(20));
    const y = bench.output(ROWS, COLUMNS);
    const tokens = bench.input(
      ids.map((id) => [id, 0]),
      "u32",
    );
    const bindings = { tokens, token_table: bench.input(table, "bf16"), y };
    const dims = { rows: ROWS, columns: y.stride };
    await bench.run(kernel, { STRIDE: y.stride, SCALE: 45.25, WORKGROUP }, bindings, { first_id: 0, ids: 20 }, dims);
    return sameAs(await bench.read(y), tokensReference(ids, table, 45.25));
  }),

  selfTest(gatherRows, async (bench, kernel) => {
    const values = new Sampler(5).f32(ROWS, COLUMNS);
    const index = [4, 0, 4, 2];
    const y = bench.output(index.length, COLUMNS);
    const bindings = { x: bench.input(values), index: bench.input([index], "u32"), y };
    const dims = { rows: index.length, columns: y.stride };
    await bench.run(kernel, { STRIDE: y.stride, WORKGROUP }, bindings, {}, dims);
    return sameAs(await bench.read(y), gatherReference(values, index));
  }),

  ...REDUCTIONS.map((variant) =>
    selfTest(
      layerNorm[variant],
      async (bench: Bench, kernel) => {
        const sampler = new Sampler(6);
        const values = sampler.f32(ROWS, 300, 2).map((row) => row.map((value) => Math.fround(value + 3)));
        const [weight, bias] = sampler.bf16(2, 300);
        const y = bench.output(ROWS, 300);
        const bindings = { x: bench.input(values), weight: bench.input([weight!]), bias: bench.input([bias!]), y };
        const constants = { COLUMNS: 300, STRIDE: y.stride, EPS: 1e-5, WORKGROUP: 128 };
        await bench.run(kernel, constants, bindings, {}, { rows: ROWS });
        return within(await bench.read(y), layerNormReference(values, weight!, bias!, 1e-5), CLOSE);
      },
      byReduction(variant),
    ),
  ),

  ...REDUCTIONS.map((variant) =>
    selfTest(
      rmsNorm[variant],
      async (bench: Bench, kernel) => {
        const sampler = new Sampler(12);
        const values = sampler.f32(ROWS, 300, 2);
        const [weight] = sampler.bf16(1, 300);
        const y = bench.output(ROWS, 300);
        const constants = { COLUMNS: 300, STRIDE: y.stride, EPS: 1e-6, OFFSET: 1, WORKGROUP: 128 };
        const bindings = { x: bench.input(values), weight: bench.input([weight!]), y };
        await bench.run(kernel, constants, bindings, {}, { rows: ROWS });
        return within(await bench.read(y), rmsReference(values, weight!, 1e-6, 1), CLOSE);
      },
      byReduction(variant),
    ),
  ),

  ...REDUCTIONS.map((variant) =>
    selfTest(
      headNorm[variant],
      async (bench: Bench, kernel) => {
        const sampler = new Sampler(13);
        const values = sampler.f32(ROWS, COLUMNS, 2);
        const [weight] = sampler.bf16(1, HEADS.headDim);
        const x = bench.input(values);
        const { headDim, headStride, first, heads } = HEADS;
        const shape = { HEAD_DIM: headDim, HEAD_STRIDE: headStride, FIRST: first, STRIDE: x.stride };
        const bindings = { weight: bench.input([weight!]), x };
        const dims = { rows: ROWS, heads };
        await bench.run(kernel, { ...shape, EPS: 1e-6, OFFSET: 0, WORKGROUP: 64 }, bindings, {}, dims);
        return within(await bench.read(x), headReference(values, weight!, 1e-6, 0, HEADS), CLOSE);
      },
      byReduction(variant),
    ),
  ),

  selfTest(rope, async (bench, kernel) => {
    const sampler = new Sampler(14);
    const values = sampler.f32(ROWS, COLUMNS, 2);
    const pairs = 5;
    const angles = matrixOf(20, 2 * pairs, (position, i) => {
      const angle = position / (1 + (i % pairs));
      return Math.fround(i < pairs ? Math.cos(angle) : Math.sin(angle));
    });
    const positions = Array.from({ length: ROWS }, () => sampler.integer(20));
    const table = bench.input(angles);
    const tokens = bench.input(
      positions.map((position) => [0, position]),
      "u32",
    );
    const { headStride, first, heads } = HEADS;
    for (const interleaved of [false, true]) {
      const x = bench.input(values);
      const constants = {
        HEADS: heads,
        HEAD_STRIDE: headStride,
        FIRST: first,
        PAIRS: pairs,
        INTERLEAVED: interleaved ? 1 : 0,
        STRIDE: x.stride,
        ANGLE_STRIDE: table.stride,
        WORKGROUP,
      };
      const dims = { rows: ROWS, columns: heads * pairs };
      await bench.run(kernel, constants, { tokens, angles: table, x }, {}, dims);
      const expected = ropeReference(values, positions, angles, HEADS, interleaved);
      const wrong = within(await bench.read(x), expected, CLOSE);
      if (wrong) return `${interleaved ? "neighbours" : "halves"}: ${wrong}`;
    }
    return undefined;
  }),

  selfTest(softcap, async (bench, kernel) => {
    const values = new Sampler(15).f32(ROWS, COLUMNS, 40);
    const x = bench.input(values);
    const dims = { rows: ROWS, columns: x.stride };
    await bench.run(kernel, { STRIDE: x.stride, CAP: 30, WORKGROUP }, { x }, {}, dims);
    const expected = values.map((row) => row.map((value) => softcapReference(value, 30)));
    return within(await bench.read(x), expected, 2 ** -8 + CLOSE); // rounded to bfloat16, of two near ones to either
  }),

  selfTest(packBf16, async (bench, kernel) => {
    const values = new Sampler(7).f32(ROWS, COLUMNS);
    const count = ROWS * COLUMNS;
    const x = bench.input(values);
    const y = bench.output(1, Math.ceil(count / 2), "u32");
    const constants = { COLUMNS, STRIDE: x.stride, WORKGROUP };
    await bench.run(kernel, constants, { x, y }, { count }, { count });
    return sameAs([halvesOf((await bench.read(y))[0]!)], [[...packReference(values), 0]]); // 375 halves and an empty one
  }),

  selfTest(transposeBf16, async (bench, kernel) => {
    const values = new Sampler(8).bf16(ROWS, COLUMNS);
    const rows = values.map((row) => wordsOf([...row.map(bitsOfBf16), 0]));
    const y = bench.output(COLUMNS, ROWS, "bf16");
    const constants = { IN_STRIDE: COLUMNS + 1, OUT_STRIDE: y.stride, WORKGROUP };
    const params = { ins: ROWS, first_in: 0, first_out: 0, outs: COLUMNS };
    await bench.run(kernel, constants, { x: bench.input(rows, "u32"), y }, params, params);
    return sameAs(
      await bench.read(y),
      transpose(values).map((row) => row.map(bitsOfBf16)),
    );
  }),

  selfTest(unpackBf16, async (bench, kernel) => {
    const bits = packReference(new Sampler(9).f32(ROWS, COLUMNS));
    const x = bench.input([wordsOf([...bits, 0])], "u32");
    const y = bench.output(ROWS, COLUMNS);
    const constants = { COLUMNS, STRIDE: y.stride, WORKGROUP };
    await bench.run(kernel, constants, { x, y }, {}, { rows: ROWS, columns: COLUMNS });
    return sameAs(await bench.read(y), unpackReference(bits, ROWS, COLUMNS));
  }),
];

const halvesOf = (words: ArrayLike<number>): Uint16Array => new Uint16Array(Uint32Array.from(words).buffer);
/** An even number of halves, two to a word. */
const wordsOf = (halves: readonly number[]): Uint32Array => new Uint32Array(Uint16Array.from(halves).buffer);
