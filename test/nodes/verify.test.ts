import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { readHeader } from "../../src/safetensors/header.ts";
import type { Verification } from "../../src/server/verify/report.ts";
import { COMMIT, fakeHub } from "../support/fake-hub.ts";
import { run } from "../support/meshnet.ts";
import { FIXTURES, TINY, variant } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

const text = join(folder.path, "text.txt");
writeFileSync(
  text,
  "Everyone is permitted to copy and distribute verbatim copies of this license document.\n".repeat(2),
);

const verify = (model: string, ...words: string[]) => run(["verify", "--model-id", model, "--text", text, ...words]);

/** A copy of the tiny model with `value` in the middle of one tensor. */
function withValue(tensor: string, value: number): string {
  const directory = join(folder.path, `${tensor} ${value}`);
  cpSync(TINY, directory, { recursive: true });
  const path = join(directory, "model.safetensors");
  const { begin, end } = readHeader(path).get(tensor)!;
  const bytes = readFileSync(path);
  bytes.writeFloatLE(value, begin + ((end - begin) / 8) * 4);
  writeFileSync(path, bytes);
  return directory;
}

describe("meshnet verify", () => {
  test("prints what each encoding costs, and by what it is judged", async () => {
    const { code, stdout } = await verify(TINY, "--max-context", "32", "--int8-activations");
    expect({ code, stdout }).toEqual({ code: 0, stdout: expect.stringMatching(/^verdict +within the bounds$/m) });
    expect(stdout).toMatch(/^text +\S+text\.txt: \d+ tokens in \d+ sequences, \d+ of them predicted$/m);
    expect(stdout).toMatch(/^ +bfloat16 +int8 +nf4 +int8-activations$/m);
    expect(stdout).toMatch(/^bytes per parameter, quantized layers +2\.0000 +1\.0313 +0\.5625 +1\.0313$/m);
    expect(stdout).toMatch(/^bytes per parameter, whole model( +\d\.\d{4}){4}$/m);
    for (const row of ["rms logit error", "max logit error", "top-1 agreement"]) {
      expect(stdout).toMatch(new RegExp(`^${row} +-( +[\\d.]+){3}$`, "m"));
    }
    for (const row of [
      "relative rms error",
      "KL divergence, nats",
      "top-1 agreement, bfloat16 sure",
      "perplexity over bfloat16's",
    ]) {
      expect(stdout).toMatch(new RegExp(`^${row} +-( +[\\d.e-]+ \\([≤≥] [\\d.]+\\)){3}$`, "m"));
    }
    expect(stdout).toMatch(/^perplexity( +[\d.e+]+){4}$/m);
    expect(stdout).toMatch(/^two runs( +same bits){4}$/m);
    expect(stdout).toMatch(/^cut at layer 2( +same bits){4}$/m);
  }, 240_000);

  test("prints the same as JSON", async () => {
    const { code, stdout } = await verify(TINY, "--json", "--quantization", "nf4");
    expect(code).toBe(0);
    const result = JSON.parse(stdout) as Verification;
    const number = expect.any(Number);
    const rest = { sameTwice: true, sameCut: true, perplexity: number };
    expect(result).toEqual({
      schema: 1,
      model: { id: TINY, revision: "local", type: "gpt2", layers: 4, parameters: number },
      device: { name: expect.any(String), driver: expect.any(String) },
      text: { source: text, tokens: number, sequences: 1, predicted: result.text.tokens - 1 },
      cut: 2,
      encodings: [
        { name: "bfloat16", bytesPerParameter: { quantized: 2, model: number }, quality: null, bounds: null, ...rest },
        {
          name: "nf4",
          bytesPerParameter: { quantized: 0.5625, model: number },
          quality: {
            rmsError: number,
            maxError: number,
            relativeRms: number,
            klDivergence: number,
            top1Agreement: number,
            sureAgreement: number,
            surePositions: number,
            perplexity: result.encodings[1]!.perplexity,
            perplexityRatio: number,
          },
          bounds: { relativeRms: number, klDivergence: number, sureAgreement: number, perplexityRatio: number },
          ...rest,
        },
      ],
      problems: [],
      ok: true,
    });
  }, 120_000);

  test("holds a model against a reference, layer by layer, and prints how near it is", async () => {
    const reference = join(TINY, "oracle.safetensors");
    const words = ["verify", "--model-id", TINY, "--reference", reference, "--quantization", "int8"];
    const { code, stdout } = await run(words);
    expect({ code, stdout }).toEqual({ code: 0, stdout: expect.stringMatching(/^verdict +within the bounds$/m) });
    expect(stdout).toMatch(/^reference +\S+oracle\.safetensors: long \(74 tokens\), middle \(22 tokens\), /m);
    expect(stdout).toMatch(/^bfloat16 after +relative rms +its noise +max error .*≤ 1\.5.*≤ 2/m);
    for (const row of ["layer 0", "layer 1", "layer 2", "final norm", "logits"]) {
      expect(stdout).toMatch(new RegExp(`^${row}( +[\\d.]+){6}$`, "m"));
    }
    expect(stdout).toMatch(/^logits +reference's bf16 +bfloat16 +int8$/m);
    expect(stdout).toMatch(/^cut after every layer +-( +same bits){2}$/m);
    expect(stdout).toMatch(/^prompts in pieces +-( +same bits){2}$/m);
  }, 120_000);

  test("asks the Hub once for a model, and after that works from what is on this machine", async () => {
    const files = Object.fromEntries(
      ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"].map((name) => [
        name,
        new Uint8Array(readFileSync(join(TINY, name))),
      ]),
    );
    using hub = fakeHub({ "org/tiny": { files } });
    const env = { HOME: folder.path, HF_ENDPOINT: hub.url };
    const words = ["verify", "--model-id", "org/tiny", "--text", text, "--quantization", "int8", "--json"];
    const first = await run(words, { env });
    const { ok, model } = JSON.parse(first.stdout) as Verification;
    expect({ code: first.code, ok, model }).toMatchObject({
      code: 0,
      ok: true,
      model: { id: "org/tiny", revision: COMMIT },
    });
    const weights = hub.requests.filter((request) => request.endsWith("model.safetensors"));
    expect(weights.length).toBeLessThan(8);
    const asked = hub.requests.length;
    expect(await run([...words, "--offline"], { env })).toMatchObject({ code: 0, stdout: first.stdout });
    expect(hub.requests).toHaveLength(asked);
  }, 120_000);

  test("names every tensor that holds NaN or infinity", async () => {
    const { code, stdout } = await verify(withValue("h.2.mlp.c_fc.weight", Number.NaN));
    expect(code).toBe(1);
    expect(stdout).toMatch(
      /^verdict +not within the bounds:\n +model\.safetensors: tensor h\.2\.mlp\.c_fc\.weight holds NaN/m,
    );
  }, 60_000);

  test("names the layer whose activations overflow although its weights do not", async () => {
    const { code, stdout } = await verify(withValue("h.2.ln_1.weight", 3e38), "--json");
    const { ok, problems, encodings } = JSON.parse(stdout) as Verification;
    expect({ code, ok, encodings }).toEqual({ code: 1, ok: false, encodings: [] });
    expect(problems[0]).toMatch(/^bfloat16: logits of sequence 0 are NaN or infinite: .* overflow in layers 2-3/);
  }, 120_000);

  test("says that there is nothing to compare where no token is likelier than another", async () => {
    const directory = join(folder.path, "flat");
    cpSync(TINY, directory, { recursive: true });
    const path = join(directory, "model.safetensors");
    const bytes = readFileSync(path);
    for (const name of ["ln_f.weight", "ln_f.bias"]) {
      const { begin, end } = readHeader(path).get(name)!;
      bytes.fill(0, begin, end);
    }
    writeFileSync(path, bytes);
    const { code, stdout } = await verify(directory);
    expect({ code, stdout }).toEqual({ code: 1, stdout: expect.stringContaining("all logits of a token are equal") });
    expect(stdout).not.toContain("NaN");
  }, 60_000);

  test("says which encoding a weight has no code in, and compares the others", async () => {
    const { code, stdout } = await verify(withValue("h.2.mlp.c_fc.weight", 70_000), "--json");
    const { problems, encodings } = JSON.parse(stdout) as Verification;
    expect(code).toBe(1);
    expect(problems[0]).toMatch(/^int8: tensor h\.2\.mlp\.c_fc\.weight holds \d+, and int8 goes through float16/);
    expect(encodings.map(({ name }) => name)).toEqual(["bfloat16", "nf4"]);
  }, 120_000);

  test("is explained by --help, with an example", async () => {
    const { code, stdout } = await run(["verify", "--help"]);
    expect({ code, stdout }).toEqual({ code: 0, stdout: expect.stringMatching(/EXAMPLES\s+meshnet verify /) });
  });

  test.each([
    ["a model without a tokenizer", 1, variant("bf16"), [], /verify reads a text and needs the model's tokenizer/],
    [
      "a model that is quantized already",
      1,
      join(FIXTURES, "bnb/checkpoints/nf4"),
      [],
      /weights of \S+ are quantized already, as nf4/,
    ],
    ["an encoding that there is not", 2, TINY, ["--quantization", "int4"], /--quantization int4: .*int8 and nf4/],
    ["a context of one token", 2, TINY, ["--max-context", "1"], /--max-context 1 .*at least 2/],
    ["a text that is not there", 2, TINY, ["--text", "/nowhere/text"], /--text \/nowhere\/text cannot be read/],
    ["a text of one token", 2, TINY, ["--text", "/dev/null"], /the text has 0 tokens/],
    ["a reference that is not there", 2, TINY, ["--reference", "/nowhere"], /--reference: \/nowhere cannot be read/],
  ])("says what is missing: %s", async (_, expected, model, words, says) => {
    const { code, stdout, stderr } = await run(["verify", "--model-id", model, ...words]);
    expect({ code, stdout, stderr }).toEqual({ code: expected, stdout: "", stderr: expect.stringMatching(says) });
    expect(stderr).not.toMatch(/\n\s+at /);
  });
});
