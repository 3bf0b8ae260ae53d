import { afterAll, afterEach, beforeAll, describe, expect, test } from "bun:test";
import { asFloats, EXPERT_TESTS, routeConstants } from "../../src/engine/self-test/experts.ts";
import { strideOf } from "../../src/gpu/tensor.ts";
import {
  EXPERT_TILE,
  expertGemm,
  expertGemv,
  expertLanes,
  GEMV_OUTPUTS,
  groupPairs,
  route,
  sharingFor,
  TILE_WORDS,
  tilesOf,
} from "../../src/kernels/index.ts";
import {
  expertProducts,
  groupPairs as groupReference,
  route as routeReference,
  type Routing,
} from "../../src/kernels/reference/experts.ts";
import type { Matrix } from "../../src/kernels/reference/matrix.ts";
import { describeOnDevices } from "../support/device.ts";
import { Bench, expectSame, expectWithin, isUnwritten, range, Sampler } from "./support.ts";

const ROUTINGS: (Routing & { name: string; experts: number })[] = [
  { name: "softmax, the only expert", experts: 1, chosen: 1, score: "softmax", normalize: true, scale: 1 },
  { name: "softmax, all experts", experts: 7, chosen: 7, score: "softmax", normalize: false, scale: 1 },
  { name: "Mixtral's", experts: 8, chosen: 2, score: "softmax", normalize: true, scale: 1 },
  { name: "Qwen's, more experts than lanes", experts: 130, chosen: 8, score: "softmax", normalize: false, scale: 1 },
  {
    name: "DeepSeek-V2's",
    experts: 160,
    chosen: 6,
    score: "softmax",
    groups: { count: 8, chosen: 3, best: 1 },
    normalize: false,
    scale: 16,
  },
  {
    name: "DeepSeek-V3's",
    experts: 256,
    chosen: 8,
    score: "sigmoid",
    bias: new Sampler(9).f32(1, 256, 0.1)[0],
    groups: { count: 8, chosen: 4, best: 2 },
    normalize: true,
    scale: 2.5,
  },
];

describeOnDevices("experts", ({ open }) => {
  let bench: Bench;
  beforeAll(async () => void (bench = new Bench(await open())));
  afterEach(() => bench.clear());
  afterAll(() => bench.destroy());

  test.each(EXPERT_TESTS.map((one) => [one.name, one] as const))(
    "pass the self-test of %s",
    async (_, one) => {
      if ((await one.missing(bench.device)) === undefined) expect(await one.run(bench)).toBeUndefined();
    },
    30_000,
  );

  describe.each(ROUTINGS)("routed as $name", ({ experts, ...routing }) => {
    const run = async (logits: Matrix) => {
      const rows = logits.length;
      const [choice, weight] = [bench.output(rows, routing.chosen, "u32"), bench.output(rows, routing.chosen, "u32")];
      const bias = bench.input([routing.bias ?? [Number.NaN]]);
      const bindings = { logits: bench.input(logits), bias, choice, weight };
      await bench.run(route, routeConstants(routing, experts), bindings, {}, { rows });
      return { choice: await bench.read(choice), weights: (await bench.read(weight)).map(asFloats) };
    };

    test("are the best of each token, weighed by their scores, whoever else is in the pass", async () => {
      const logits = new Sampler(experts).f32(20, experts, 2);
      const { choice, weights } = await run(logits);
      const expected = routeReference(logits, routing);
      expectSame(choice, expected.choice);
      expectWithin(weights, expected.weights, (row, i) => 1e-5 * Math.abs(expected.weights[row]![i]!));
      expectSame((await run(logits.slice(13, 14))).weights, weights.slice(13, 14));
    }, 30_000);

    test("are those with the lowest numbers among equals, each once", async () => {
      const logits = range(0, 3).map(() => range(0, experts).map(() => 1.5));
      const plain = routing.bias ? undefined : range(0, routing.chosen);
      const { choice } = await run(logits);
      expectSame(choice, routeReference(logits, routing).choice);
      if (plain) expect(Array.from(choice[0]!)).toEqual(plain);
      expect(new Set(choice[0]!).size).toBe(routing.chosen);
    }, 30_000);
  });

  test("that score NaN give some choice and no other harm", async () => {
    const routing: Routing = { chosen: 2, score: "sigmoid", normalize: true, scale: 1 };
    const choice = bench.output(1, 2, "u32");
    const bindings = {
      logits: bench.input([range(0, 5).map(() => Number.NaN)]),
      bias: bench.input([[0]]),
      choice,
      weight: bench.output(1, 2, "u32"),
    };
    await bench.run(route, routeConstants(routing, 5), bindings, {}, { rows: 1 });
    for (const expert of (await bench.read(choice))[0]!) expect(expert).toBeLessThan(5);
  }, 30_000);

  test.each([1, 31, 32, 33, 300])(
    "are grouped into tiles of their own: %i pairs",
    async (pairs) => {
      const sampler = new Sampler(pairs);
      const experts = 140; // more than lanes
      const choice = range(0, pairs).map(() => (sampler.integer(3) === 0 ? sampler.integer(experts) : 139));
      const tiles = tilesOf(pairs, experts);
      const [order, table] = [bench.output(1, pairs, "u32"), bench.output(tiles, TILE_WORDS, "u32")];
      const bindings = { choice: bench.input([choice], "u32"), order, tiles: table };
      await bench.run(groupPairs, { EXPERTS: experts }, bindings, { pairs, tiles }, {});
      const expected = groupReference(choice, experts, EXPERT_TILE);
      expect(expected.tiles.length).toBeLessThanOrEqual(tiles);
      expectSame(await bench.read(order), [expected.order]);
      const none = range(expected.tiles.length, tiles).map(() => [0, 0, 0, 0]);
      expectSame(await bench.read(table), [...expected.tiles, ...none]);
    },
    30_000,
  );

  describe.each([
    { columns: 7, outputs: 5, share: 1 },
    { columns: 75, outputs: 37, share: 3 },
    { columns: 129, outputs: 33, share: 1 },
    { columns: 1032, outputs: 9, share: 3 }, // more than 32 blocks: lanes take a second one
  ])("of $outputs outputs of $columns columns, a row for $share", ({ columns, outputs, share }) => {
    const EXPERTS = 4;
    const sampler = new Sampler(columns);
    const weights = range(0, EXPERTS).map(() => sampler.bf16(outputs, columns));
    const outAt = 3;
    const constants = {
      WEIGHT_STRIDE: strideOf(columns, "bf16"),
      COLUMNS: columns,
      STRIDE_OUT: strideOf(outAt + outputs, "f32"),
      OUT_AT: outAt,
      SHARE: share,
    };

    /** `parts`: experts and outputs of each tensor that holds some of the weights. */
    const run = async (
      kernel: "gemv" | "lanes" | "gemm",
      x: Matrix,
      choice: number[],
      parts: { experts: [number, number]; rows: [number, number] }[],
    ): Promise<Matrix> => {
      const y = bench.output(choice.length, outAt + outputs);
      const { order, tiles } = groupReference(choice, EXPERTS, EXPERT_TILE);
      const tables = { order: bench.input([order], "u32"), tiles: bench.input([...tiles, [0, 0, 0, 0]], "u32") };
      const rows = bench.input(x);
      for (const { experts, rows: some } of parts) {
        const stack = weights.slice(...experts).flatMap((weight) => weight.slice(...some));
        const params = {
          first_expert: experts[0],
          experts: experts[1] - experts[0],
          outputs: some[1] - some[0],
          first_output: some[0],
        };
        const operands = { weight: bench.input(stack, "bf16"), scales: rows, x: rows, y };
        if (kernel === "gemv") {
          const blocks = { OUTPUTS: GEMV_OUTPUTS, BLOCKS: Math.ceil(constants.WEIGHT_STRIDE / 32) };
          const bindings = { ...operands, choice: bench.input([choice], "u32") };
          const dims = { pairs: choice.length, outputs: params.outputs };
          await bench.run(expertGemv.bf16, { ...constants, ...blocks }, bindings, params, dims);
        } else if (kernel === "lanes") {
          const { bf16 } = expertLanes[sharingFor(bench.device.info.subgroupMinSize)];
          const bindings = { ...operands, choice: bench.input([choice], "u32") };
          await bench.run(bf16, constants, bindings, params, { pairs: choice.length, outputs: params.outputs });
        } else {
          const dims = { tiles: tiles.length + 1, outputs: params.outputs };
          await bench.run(expertGemm.bf16, constants, { ...operands, ...tables }, params, dims);
        }
      }
      return (await bench.read(y)).map((row) => {
        expect(row.subarray(0, outAt).every(isUnwritten)).toBe(true);
        return row.subarray(outAt);
      });
    };
    const whole = [{ experts: [0, EXPERTS], rows: [0, outputs] }] as Parameters<typeof run>[3];

    test("multiply in the one order of addition, by any kernel", async () => {
      const pairs = 99;
      const choice = range(0, pairs).map(() => [0, 0, 0, 2, 3][sampler.integer(5)]!); // one that nobody takes
      const x = sampler.bf16(pairs / share, columns);
      const expected = expertProducts(x, weights, choice, share);
      for (const kernel of ["gemv", "lanes", "gemm"] as const) {
        expectSame(await run(kernel, x, choice, whole), expected);
      }
    }, 30_000);

    test("give the same bits however they lie in tensors", async () => {
      const choice = range(0, 42).map((pair) => pair % EXPERTS);
      const x = sampler.f32(42 / share, columns);
      const together = await run("gemv", x, choice, whole);
      const someRows = [...range(0, EXPERTS)].flatMap((e) => [
        { experts: [e, e + 1], rows: [0, 4] },
        { experts: [e, e + 1], rows: [4, outputs] },
      ]) as typeof whole;
      const someExperts = [
        { experts: [0, 1], rows: [0, outputs] },
        { experts: [1, EXPERTS], rows: [0, outputs] },
      ] as typeof whole;
      for (const parts of [whole, someExperts, someRows]) {
        for (const kernel of ["gemv", "lanes", "gemm"] as const) {
          expectSame(await run(kernel, x, choice, parts), together);
        }
      }
    }, 30_000);
  });
});
