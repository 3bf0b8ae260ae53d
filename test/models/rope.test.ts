import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { readModel } from "../../src/models/index.ts";
import { pairsOf, type Rope, ropeAngles, ropeFrequencies } from "../../src/models/rope.ts";
import { FIXTURES, Oracle } from "../support/oracle.ts";

interface Case {
  config: Record<string, unknown>;
  layer?: "full_attention" | "sliding_attention";
  positions: number[];
  max_context: number;
}

const FOLDER = join(FIXTURES, "rope");
const oracle = new Oracle(FOLDER, "rope.safetensors");
const cases = (JSON.parse(readFileSync(join(FOLDER, "rope.json"), "utf8")) as { cases: Record<string, Case> }).cases;

/** What the family makes of the configuration; GPT-NeoX has one for itself, the others by kind of layer. */
function ropeOf({ config, layer }: Case): Rope {
  const read = readModel(config).config as unknown as { rope?: Rope; ropes: Record<string, Rope> };
  return read.rope ?? read.ropes[layer?.replace("_attention", "") ?? "all"]!;
}

describe.each(Object.entries(cases))("the rope of %s", (name, { positions, max_context, ...rest }) => {
  const rope = ropeOf({ positions, max_context, ...rest });
  const { type } = rope.scaling;

  if (type !== "dynamic")
    test("has transformers' frequencies, but for a last bit here and there", () => {
      const expected = oracle.floats(`${name}.frequencies`);
      const actual = ropeFrequencies(rope, max_context)(0);
      expect(actual.length).toBe(expected.length);
      const off = [...actual].map((value, i) => Math.abs(value - expected[i]!) / expected[i]!);
      expect(Math.max(...off)).toBeLessThan(4 * 2 ** -24);
      expect(off.filter((error) => error > 0).length).toBeLessThanOrEqual(expected.length * 0.1);
    });

  test("turns each position by transformers' angles", () => {
    const pairs = pairsOf(rope);
    for (const position of positions) {
      const [cosines, sines] = [new Float32Array(pairs), new Float32Array(pairs)];
      ropeAngles(rope, max_context)(position, cosines, sines);
      const expected = { cos: oracle.floats(`${name}.${position}.cos`), sin: oracle.floats(`${name}.${position}.sin`) };
      const frequencies = ropeFrequencies(rope, max_context)(position);
      // A frequency that is off by two units in the last place turns its angle by as much.
      for (let pair = 0; pair < pairs; pair++) {
        const bound = 2 ** -22 + position * frequencies[pair]! * 4 * 2 ** -24 * 1.5;
        expect(Math.abs(cosines[pair]! - expected.cos[pair]!)).toBeLessThan(bound);
        expect(Math.abs(sines[pair]! - expected.sin[pair]!)).toBeLessThan(bound);
      }
    }
  });
});

describe("a rope that cannot be is refused by name:", () => {
  const llama = (rope_scaling: Record<string, unknown>) => ({ model_type: "llama", rope_scaling });
  test.each([
    [llama({ rope_type: "proportional" }), /rope_type "proportional".*llama3/],
    [llama({ type: "ntk-by-parts" }), /rope_type "ntk-by-parts"/],
    [llama({ rope_type: "toString" }), /rope_type "toString"/],
    [llama({ rope_type: "linear" }), /no "factor"/],
    [llama({ rope_type: "linear", factor: 0 }), /"factor" is 0/],
    [llama({ rope_type: "llama3", factor: 8 }), /no "low_freq_factor"/],
    [{ model_type: "phi3", rope_scaling: { type: "linear", factor: 2 } }, /"linear".*this family/],
    [{ model_type: "phi3", rope_scaling: { type: "longrope", short_factor: [1], long_factor: [1] } }, /48 numbers/],
  ])("%j", (json, says) => {
    expect(() => readModel(json)).toThrow(UserError);
    let error: UserError | undefined;
    try {
      readModel(json);
    } catch (thrown) {
      error = thrown as UserError;
    }
    expect(`${error!.message} ${error!.hint}`).toMatch(says);
  });
});

describe("where the parameters of a rope may stand:", () => {
  const rope = (json: Record<string, unknown>, name = "all") =>
    (readModel(json).config as unknown as { ropes: Record<string, Rope> }).ropes[name]!;

  test("an empty rope_scaling, null and a missing one say nothing", () => {
    for (const rope_scaling of [{}, null, undefined]) {
      expect(rope({ model_type: "llama", rope_scaling, rope_parameters: { rope_theta: 7 } })).toMatchObject({
        theta: 7,
      });
    }
  });

  test("rope_scaling counts before rope_parameters, and θ in it before the one beside it", () => {
    const rope_scaling = { type: "linear", factor: 2, rope_theta: 5 };
    const json = { model_type: "llama", rope_theta: 6, rope_scaling, rope_parameters: { rope_type: "default" } };
    expect(rope(json)).toMatchObject({ theta: 5, scaling: { type: "linear", factor: 2 } });
    expect(rope({ ...json, rope_scaling: { type: "linear", factor: 2 } })).toMatchObject({ theta: 6 });
  });

  test("rope_type counts before type", () => {
    expect(rope({ model_type: "llama", rope_scaling: { rope_type: "linear", type: "yarn", factor: 2 } })).toMatchObject(
      {
        scaling: { type: "linear" },
      },
    );
  });

  test("the original length is the model's own where no one says it, and Phi-3's stands beside the parameters", () => {
    const yarn = { rope_type: "yarn", factor: 2 };
    expect(rope({ model_type: "llama", max_position_embeddings: 99, rope_scaling: yarn })).toMatchObject({
      scaling: { trained: 99 },
    });
    const factors = Array.from({ length: 48 }, () => 1);
    const longrope = { type: "su", short_factor: factors, long_factor: factors, original_max_position_embeddings: 7 };
    const phi3 = { model_type: "phi3", original_max_position_embeddings: 2048, rope_scaling: longrope };
    expect(rope(phi3)).toMatchObject({ scaling: { type: "longrope", trained: 2048 } });
  });

  test("a model whose rope stretches it knows more positions than max_position_embeddings says", () => {
    const reach = (rope_scaling: Record<string, unknown>) =>
      readModel({ model_type: "llama", max_position_embeddings: 2048, rope_scaling }).config.maxPositions;
    expect(reach({ type: "linear", factor: 4 })).toBe(2048); // such files say the stretched length
    expect(reach({ type: "dynamic", factor: 4 })).toBe(8192);
    expect(reach({ type: "yarn", factor: 4, original_max_position_embeddings: 2048 })).toBe(8192);
    expect(reach({ type: "yarn", factor: 2, original_max_position_embeddings: 512 })).toBe(2048);
  });

  test("with longrope a model has an edge, beyond which contexts are turned otherwise", () => {
    const factors = Array.from({ length: 48 }, () => 1);
    const rope_scaling = { type: "longrope", short_factor: factors, long_factor: factors };
    const { config } = readModel({ model_type: "phi3", max_position_embeddings: 131072, rope_scaling });
    expect(config).toMatchObject({ contextEdge: 4096, maxPositions: 131072 });
    expect(readModel({ model_type: "phi3" }).config.contextEdge).toBeUndefined();
  });

  test("Gemma 3 scales its full layers only", () => {
    const json = { model_type: "gemma3_text", rope_scaling: { rope_type: "linear", factor: 8 } };
    expect(rope(json, "full")).toMatchObject({ theta: 1e6, scaling: { type: "linear", factor: 8 } });
    expect(rope(json, "sliding")).toMatchObject({ theta: 1e4, scaling: { type: "default" } });
  });
});
