import { strideOf } from "../../gpu/tensor.ts";
import {
  addGated,
  combineExperts,
  EXPERT_TILE,
  expertGemm,
  expertGemv,
  expertLanes,
  GEMV_OUTPUTS,
  groupPairs,
  route,
  TILE_WORDS,
  tilesOf,
  WORKGROUP,
} from "../../kernels/index.ts";
import {
  addGated as gatedReference,
  combineExperts as combineReference,
  expertProducts,
  groupPairs as groupReference,
  route as routeReference,
  type Routing,
} from "../../kernels/reference/experts.ts";
import { matrixOf } from "../../kernels/reference/matrix.ts";
import type { Bench, Row } from "./bench.ts";
import { Sampler } from "./sampler.ts";
import { bySharing, type SelfTest, selfTest } from "./self-test.ts";
import { sameAs, within } from "./verdict.ts";
import { encoded, ENCODED, ENCODINGS, SHARINGS } from "./weights.ts";

// A mixture of six experts, of which each of 23 tokens takes two. Some are equal, and some nobody takes.
const TOKENS = 23;
const EXPERTS = 6;
const CHOSEN = 2;
const CLOSE = 1e-5;

const ROUTINGS: readonly Routing[] = [
  { chosen: CHOSEN, score: "softmax", normalize: true, scale: 1 },
  { chosen: CHOSEN, score: "softmax", normalize: false, scale: 1.5, groups: { count: 3, chosen: 2, best: 1 } },
  {
    chosen: CHOSEN,
    score: "sigmoid",
    bias: [0.3, -0.2, 0, 0.4, -0.1, -0.2].map(Math.fround),
    normalize: true,
    scale: 2.5,
    groups: { count: 3, chosen: 1, best: 2 },
  },
];

/** The overrides of `route` for a routing. */
export const routeConstants = (
  { chosen, score, bias, groups = { count: 1, chosen: 1, best: 1 }, normalize, scale }: Routing,
  experts: number,
) => ({
  EXPERTS: experts,
  STRIDE: strideOf(experts, "f32"),
  CHOSEN: chosen,
  SIGMOID: score === "sigmoid" ? 1 : 0,
  HAS_BIAS: bias ? 1 : 0,
  GROUPS: groups.count,
  TOP_GROUPS: groups.chosen,
  GROUP_BEST: groups.best,
  NORMALIZE: normalize ? 1 : 0,
  SCALE: scale,
});

/** A row of words as the float32 values that they are. */
export const asFloats = (row: Row): Float32Array => new Float32Array(Uint32Array.from(row).buffer);

/** Experts 1 and 5 have the same logits. */
const logitsOf = (): number[][] => new Sampler(60).f32(TOKENS, EXPERTS, 2).map((row) => row.with(5, row[1]!));

export const EXPERT_TESTS: readonly SelfTest[] = [
  selfTest(route, async (bench, kernel) => {
    const logits = logitsOf();
    for (const routing of ROUTINGS) {
      const [choice, weight] = [bench.output(TOKENS, CHOSEN, "u32"), bench.output(TOKENS, CHOSEN, "u32")];
      const bias = bench.input([routing.bias ?? [Number.NaN]]);
      const bindings = { logits: bench.input(logits), bias, choice, weight };
      await bench.run(kernel, routeConstants(routing, EXPERTS), bindings, {}, { rows: TOKENS });
      const expected = routeReference(logits, routing);
      const wrong =
        sameAs(await bench.read(choice), expected.choice) ??
        within((await bench.read(weight)).map(asFloats), expected.weights, CLOSE);
      if (wrong) return `${routing.score}: ${wrong}`;
    }
    return undefined;
  }),

  selfTest(groupPairs, async (bench, kernel) => {
    const { choice, pairs, tiles } = pairsOf();
    const order = bench.output(1, pairs, "u32");
    const table = bench.output(tiles, TILE_WORDS, "u32");
    const bindings = { choice: bench.input([choice], "u32"), order, tiles: table };
    await bench.run(kernel, { EXPERTS }, bindings, { pairs, tiles }, {});
    const expected = groupReference(choice, EXPERTS, EXPERT_TILE);
    const filled = [...expected.tiles, ...matrixOf(tiles - expected.tiles.length, TILE_WORDS, () => 0)];
    return sameAs(await bench.read(order), [expected.order]) ?? sameAs(await bench.read(table), filled);
  }),

  ...ENCODINGS.flatMap((encoding) => [
    selfTest(expertGemv[encoding], async (bench: Bench, kernel) => {
      const { x, y, operands, choice, pairs, expected } = products(bench, encoding);
      const constants = { ...PRODUCT, OUTPUTS: GEMV_OUTPUTS, BLOCKS: Math.ceil(ENCODED.stride / 32) };
      const bindings = { ...operands, x, y, choice: bench.input([choice], "u32") };
      await bench.run(kernel, constants, bindings, PARAMS, { pairs, outputs: OUTPUTS });
      return sameAs(await bench.read(y), expected);
    }),
    ...SHARINGS.map((sharing) =>
      selfTest(
        expertLanes[sharing][encoding],
        async (bench: Bench, kernel) => {
          const { x, y, operands, choice, pairs, expected } = products(bench, encoding);
          const bindings = { ...operands, x, y, choice: bench.input([choice], "u32") };
          await bench.run(kernel, PRODUCT, bindings, PARAMS, { pairs, outputs: OUTPUTS });
          return sameAs(await bench.read(y), expected);
        },
        bySharing(sharing),
      ),
    ),
    selfTest(expertGemm[encoding], async (bench: Bench, kernel) => {
      const { x, y, operands, choice, expected } = products(bench, encoding);
      const { order, tiles } = groupReference(choice, FIRST + PARAMS.experts, EXPERT_TILE);
      const tables = { order: bench.input([order], "u32"), tiles: bench.input([...tiles, [0, 0, 0, 0]], "u32") };
      const dims = { tiles: tiles.length + 1, outputs: OUTPUTS };
      await bench.run(kernel, PRODUCT, { ...operands, ...tables, x, y }, PARAMS, dims);
      return sameAs(await bench.read(y), expected);
    }),
  ]),

  selfTest(combineExperts, async (bench, kernel) => {
    const sampler = new Sampler(62);
    const [x, weights] = [sampler.f32(TOKENS * CHOSEN, 75), sampler.f32(TOKENS, CHOSEN)];
    const y = bench.output(TOKENS, 75);
    const weight = bench.input(
      weights.map((row) => new Uint32Array(Float32Array.from(row).buffer)),
      "u32",
    );
    const dims = { rows: TOKENS, columns: y.stride };
    await bench.run(kernel, { CHOSEN, STRIDE: y.stride, WORKGROUP }, { x: bench.input(x), weight, y }, {}, dims);
    return within(await bench.read(y), combineReference(x, weights), CLOSE);
  }),

  selfTest(addGated, async (bench, kernel) => {
    const sampler = new Sampler(63);
    const [before, x, gate] = [sampler.f32(5, 75), sampler.f32(5, 75), sampler.f32(5, 1, 3)];
    const y = bench.input(before);
    const constants = { STRIDE: y.stride, GATE_STRIDE: strideOf(1, "f32"), WORKGROUP };
    const bindings = { x: bench.input(x), gate: bench.input(gate), y };
    await bench.run(kernel, constants, bindings, {}, { rows: 5, columns: y.stride });
    return within(await bench.read(y), gatedReference(before, x, gate.flat()), CLOSE);
  }),
];

function pairsOf() {
  const { choice } = routeReference(logitsOf(), ROUTINGS[0]!);
  const pairs = TOKENS * CHOSEN;
  return { choice: choice.flat(), pairs, tiles: tilesOf(pairs, EXPERTS) };
}

/** Of the rows that `weights.ts` encodes each expert has twelve. The stack begins with expert 3; every pair's is in it. */
const FIRST = 3;
const OUTPUTS = 12;
const PARAMS = { first_expert: FIRST, experts: 3, outputs: OUTPUTS, first_output: 0 };
const PRODUCT = {
  WEIGHT_STRIDE: ENCODED.stride,
  COLUMNS: ENCODED.columns,
  STRIDE_OUT: strideOf(OUTPUTS, "f32"),
  OUT_AT: 0,
  SHARE: CHOSEN,
};

function products(bench: Bench, encoding: (typeof ENCODINGS)[number]) {
  const sampler = new Sampler(61);
  const pairs = 2 * 40; // of one expert more than a tile
  const choice = Array.from({ length: pairs }, () => FIRST + Math.min(2, sampler.integer(6)));
  const { operands, values } = encoded(bench, encoding);
  const stack = Array.from({ length: 3 }, (_, expert) => values.slice(expert * OUTPUTS, (expert + 1) * OUTPUTS));
  const rows = sampler.bf16(pairs / CHOSEN, ENCODED.columns);
  const expected = expertProducts(
    rows,
    stack,
    choice.map((expert) => expert - FIRST),
    CHOSEN,
  );
  return { x: bench.input(rows), y: bench.output(pairs, OUTPUTS), operands, choice, pairs, expected };
}
