import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { silentLogger } from "../../src/base/log.ts";
import { readHeader } from "../../src/safetensors/header.ts";
import type { ReferenceVerification } from "../../src/server/verify/report.ts";
import { verify, type VerifyConfig } from "../../src/server/verify/verify.ts";
import { softwareDevices } from "../support/device.ts";
import { FIXTURES, TINY } from "../support/oracle.ts";
import { safetensorsFile, type SourceTensor, temporaryFolder } from "../support/safetensors.ts";

const LLAMA = join(FIXTURES, "families/llama");
const oracleOf = (model: string): string => join(model, "oracle.safetensors");

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** A copy of a model, to be changed. */
function copyOf(model: string): string {
  const directory = mkdtempSync(join(folder.path, "model-"));
  cpSync(model, directory, { recursive: true });
  return directory;
}

/** A copy of the tiny model, which is in float32, with other values in one tensor. */
function withWeights(tensor: string, change: (values: Float32Array) => void): string {
  const directory = copyOf(TINY);
  const path = join(directory, "model.safetensors");
  const { begin, end } = readHeader(path).get(tensor)!;
  const bytes = readFileSync(path);
  const values = new Float32Array(Uint8Array.from(bytes.subarray(begin, end)).buffer);
  change(values);
  bytes.set(new Uint8Array(values.buffer), begin);
  writeFileSync(path, bytes);
  return directory;
}

type Tensors = Record<string, SourceTensor>;

/** The tiny model's reference with the prompt `short` only, changed. */
function changedReference(change: (tensors: Tensors) => void): string {
  const bytes = readFileSync(oracleOf(TINY));
  const entries = [...readHeader(oracleOf(TINY)).values()].filter(({ name }) => name.startsWith("short."));
  const tensors: Tensors = Object.fromEntries(
    entries.map(({ name, dtype, shape, begin, end }) => [
      name,
      { dtype, shape: [...shape], data: Uint8Array.from(bytes.subarray(begin, end)) },
    ]),
  );
  change(tensors);
  const path = join(mkdtempSync(join(folder.path, "reference-")), "reference.safetensors");
  writeFileSync(path, safetensorsFile(tensors));
  return path;
}

/** One will do: that devices agree on every kernel is tested elsewhere. */
const adapter = softwareDevices.find((device) => device.adapter !== undefined)?.adapter;

describe.skipIf(adapter === undefined)(`verify with a reference on ${adapter ?? "a software device"}`, () => {
  const run = async (modelId: string, config: Partial<VerifyConfig> = {}) => {
    const rest = { device: adapter!, offline: true, compared: [], reference: oracleOf(modelId), ...config };
    const result = await verify({ modelId, ...rest }, { log: silentLogger, env: {} });
    if (!("reference" in result)) throw new Error("it read a text");
    return result;
  };
  /** Names of the places that are outside their bounds. */
  const outside = ({ layers }: ReferenceVerification) =>
    layers.filter(({ isWithin }) => !isWithin).map(({ name }) => name);

  test("finds a right model within transformers' own noise: every layer, every cut, whole and in pieces", async () => {
    const result = await run(TINY, { compared: ["int8", "int8-activations", "nf4"] });
    expect(result).toMatchObject({ ok: true, problems: [], firstDiverging: null });
    expect(result.reference.prompts.map(({ name }) => name)).toEqual(["long", "middle", "one", "short", "unicode"]);
    expect(result.layers.map(({ name }) => name)).toEqual(["layer 0", "layer 1", "layer 2", "final norm", "logits"]);
    for (const { relativeRms, relativeNoise, toFloat32, toBfloat16 } of result.layers) {
      expect(relativeRms).toBeWithin(relativeNoise / 10, relativeNoise);
      expect(toFloat32).toBeLessThan(1);
      expect(toBfloat16).toBeWithin(0.5, 1.5);
    }
    const same = { sameCuts: true, samePieces: true };
    expect(result.encodings).toMatchObject([
      { name: "bfloat16", bounds: null, ...same },
      { name: "int8", ...same },
      { name: "int8-activations", sameCuts: true, samePieces: null },
      { name: "nf4", ...same },
    ]);
    const [bfloat16, int8, , nf4] = result.encodings.map(({ quality }) => quality.relativeRms);
    expect(bfloat16!).toBeLessThan(result.referenceQuality!.relativeRms);
    expect(int8!).toBeWithin(bfloat16!, nf4!);
  }, 120_000);

  test("finds a Llama with every oddity within its noise", async () => {
    expect(await run(LLAMA, { compared: ["int8", "nf4"] })).toMatchObject({ ok: true, problems: [] });
  }, 120_000);

  test("names the first layer that a wrong epsilon leads astray", async () => {
    const directory = copyOf(LLAMA);
    const config = JSON.parse(readFileSync(join(directory, "config.json"), "utf8"));
    writeFileSync(join(directory, "config.json"), JSON.stringify({ ...config, rms_norm_eps: config.rms_norm_eps / 2 }));
    const result = await run(directory);
    expect(result).toMatchObject({ ok: false, firstDiverging: "layer 0" });
    expect(result.problems).toEqual([
      expect.stringMatching(/^bfloat16 diverges first at layer 0, most of all in prompt \w+: it is /),
    ]);
  }, 60_000);

  test("names the layer whose weights are damaged", async () => {
    const model = withWeights("h.2.mlp.c_proj.weight", (values) => void values.subarray(0, 640).reverse());
    const result = await run(model);
    expect(result).toMatchObject({ ok: false, firstDiverging: "layer 2" });
    expect(outside(result)).toEqual(["layer 2", "final norm", "logits"]);
  }, 60_000);

  test("names the tensor and the layer of a weight that is NaN, and runs nothing", async () => {
    const result = await run(withWeights("h.1.mlp.c_fc.weight", (values) => void (values[7] = Number.NaN)));
    expect(result).toMatchObject({ ok: false, layers: [], encodings: [], referenceQuality: null });
    expect(result.problems).toEqual([
      "model.safetensors: tensor h.1.mlp.c_fc.weight holds NaN as bfloat16, at element 7, in layer 1",
    ]);
  }, 60_000);

  test("names device, layer and tensor where activations overflow, and goes no further", async () => {
    const result = await run(withWeights("h.2.ln_1.weight", (values) => void values.fill(3e38)));
    expect(result).toMatchObject({ ok: false, firstDiverging: null, encodings: [] });
    expect(result.layers.map(({ name }) => name)).toEqual(["layer 0", "layer 1"]);
    expect(result.problems).toEqual([
      expect.stringMatching(
        /^bfloat16 on .+, layers 2-3 of 4: the hidden states after layer 2 hold -?(NaN|Infinity) for prompt long at token 0, value \d+; /,
      ),
    ]);
  }, 60_000);

  test("uses a reference that lies beside the weights", async () => {
    const directory = copyOf(TINY);
    cpSync(
      changedReference(() => {}),
      join(directory, "reference.safetensors"),
    );
    const { ok, reference } = await run(directory, { reference: undefined });
    expect({ ok, reference }).toEqual({
      ok: true,
      reference: { file: join(directory, "reference.safetensors"), prompts: [{ name: "short", tokens: 5 }] },
    });
  }, 60_000);

  describe("refuses", () => {
    const nan = (data: Uint8Array) => new DataView(data.buffer).setFloat32(40, Number.NaN, true);
    const ids = (...values: number[]) => new Uint8Array(Int32Array.from(values).buffer);

    test.each<[what: string, config: () => Partial<VerifyConfig>, says: RegExp]>([
      ["a file that is not there", () => ({ reference: "/nowhere" }), /\/nowhere cannot be read: ENOENT/],
      [
        "a file of another kind",
        () => ({ reference: join(TINY, "config.json") }),
        /config\.json is not a SafeTensors file that can be read/,
      ],
      [
        "what is no reference",
        () => ({ reference: join(TINY, "model.safetensors") }),
        /holds no prompt: no NAME\.input_ids with NAME\.fp32\.logits/,
      ],
      [
        "another model's",
        () => ({ reference: oracleOf(LLAMA) }),
        /has full\.fp32\.hidden\.1 as \[40, 36\], and the model makes it \[40, \d+\]/,
      ],
      [
        "one without a layer",
        () => ({ reference: changedReference((tensors) => delete tensors["short.bf16_eager.hidden.2"]) }),
        /holds no short\.bf16_eager\.hidden\.2/,
      ],
      [
        "one of a model with more layers",
        () => ({
          reference: changedReference((tensors) => {
            tensors["short.fp32.hidden.5"] = tensors["short.fp32.hidden.1"]!;
          }),
        }),
        /is of a model with more than 4 layers/,
      ],
      [
        "an unknown token",
        () => ({
          reference: changedReference((tensors) => void (tensors["short.input_ids"]!.data = ids(1, 2, 9999, 3, 4))),
        }),
        /has token 9999 in short, and the model has \d+/,
      ],
      [
        "ids of another type",
        () => ({ reference: changedReference((tensors) => void (tensors["short.input_ids"]!.dtype = "F32")) }),
        /has short\.input_ids as F32 \[5\], not as I32 \[tokens\]/,
      ],
      [
        "NaN in it",
        () => ({ reference: changedReference((tensors) => nan(tensors["short.fp32.hidden.1"]!.data)) }),
        /holds NaN in short\.fp32\.hidden\.1, at element 10/,
      ],
      [
        "one without noise",
        () => ({
          reference: changedReference((tensors) => {
            tensors["short.bf16_eager.norm"] = tensors["short.fp32.norm"]!;
          }),
        }),
        /has the same values in short\.fp32\.norm and \.bf16_eager: there is no noise/,
      ],
      [
        "runs of two models",
        () => ({ reference: changedReference((tensors) => void tensors["short.fp32.hidden.2"]!.data.fill(0x3f)) }),
        /has runs that are not of one model: short\.bf16_eager\.hidden\.2 is \d+ % off short\.fp32\.hidden\.2 \(rms\)/,
      ],
      ["a text besides", () => ({ text: "/dev/null" }), /--text and --reference are both given/],
      ["a context that it exceeds", () => ({ maxContext: 73 }), /--max-context 73 is less than the 74 tokens/],
    ])("%s", async (_, config, says) => {
      await expect(run(TINY, config())).rejects.toMatchObject({
        code: "bad_usage",
        message: expect.stringMatching(says),
      });
    });
  });
});
