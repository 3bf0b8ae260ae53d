import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, mkdirSync, readFileSync, rmSync, symlinkSync, truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { NodeProcess, run } from "../support/meshnet.ts";
import { FIXTURES, TINY, variant } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** A copy of the tiny model with something wrong. */
function broken(name: string, breakIt: (directory: string) => void): string {
  const directory = join(folder.path, name);
  cpSync(TINY, directory, { recursive: true });
  breakIt(directory);
  return directory;
}

const setConfig = (key: string, value: unknown) => (directory: string) => {
  const path = join(directory, "config.json");
  writeFileSync(path, JSON.stringify({ ...JSON.parse(readFileSync(path, "utf8")), [key]: value }));
};

const replacedBy = (name: string, make: (path: string) => void) => (directory: string) => {
  rmSync(join(directory, name));
  make(join(directory, name));
};

/** As tests change it. */
type TokenizerFile = { added_tokens: unknown; model: { vocab: Record<string, unknown>; merges: unknown[] } };
const setTokenizer = (change: (tokenizer: TokenizerFile) => void) => (directory: string) => {
  const path = join(directory, "tokenizer.json");
  const tokenizer: TokenizerFile = JSON.parse(readFileSync(path, "utf8"));
  change(tokenizer);
  writeFileSync(path, JSON.stringify(tokenizer));
};

const node = (...words: string[]) => ["node", "--model-id", TINY, ...words];
const model = (directory: string) => ["node", "--model-id", directory, "--port", "0"];

describe("wrong usage exits with 2 and says what would be right:", () => {
  test.each([
    ["a flag that is misspelt", node("--shard-strat", "0"), /unknown flag --shard-strat[^]*--shard-start/],
    ["a flag that nothing resembles", node("--quux"), /unknown flag --quux[^]*--help/],
    ["a flag without its value", node("--port"), /--port needs a value/],
    ["a flag with an empty value", node("--port="), /--port needs a value/],
    ["a word too many", node("extra"), /unexpected word "extra"/],
    ["a missing model", ["node"], /model-id/],
    ["a port that is no number", node("--port", "http"), /--port http.*whole number from 0 to 65535/],
    ["a port that is too large", node("--port", "65536"), /--port 65536/],
    ["a range that ends beyond the model", node("--shard-end", "9"), /--shard-end 9 is beyond the model's 4 layers/],
    [
      "a range that is empty",
      node("--shard-start", "2", "--shard-end", "2"),
      /--shard-start 2 is not below --shard-end 2/,
    ],
    [
      "a range that runs backwards",
      node("--shard-start", "3", "--shard-end", "1"),
      /--shard-start 3 is not below --shard-end 1/,
    ],
    ["a negative layer", node("--shard-start", "-1"), /--shard-start -1/],
    ["a context beyond the model's", node("--max-context", "257"), /--max-context 257.*256/],
    ["a next node that is no URL", node("--shard-end", "2", "--next", "localhost"), /localhost/],
    ["a flag that is given twice", node("--port", "1", "--port=2"), /--port is given twice/],
    [
      "a next node behind the model's last layer",
      node("--next", "http://127.0.0.1:1"),
      /--next http:\/\/127.0.0.1:1.*the model ends/,
    ],
    ["a next node with a password", node("--shard-end", "2", "--next", "http://u:secret@h"), /has a password in it/],
    ["a host with a scheme", node("--allow-host", "http://x"), /--allow-host http:\/\/x is no host name/],
    ["an origin that is none", node("--allow-origin", "*"), /--allow-origin \* is no origin/],
    [
      "INT8 activations without INT8 weights",
      node("--int8-activations"),
      /--int8-activations are for int8 weights, and these are bfloat16/,
    ],
    [
      "another encoding than the checkpoint's own",
      ["node", "--model-id", join(FIXTURES, "bnb/checkpoints/nf4"), "--quantization", "int8"],
      /--quantization int8.*quantized already, as nf4/,
    ],
    ["an encoding that there is not", node("--quantization", "fp8"), /quantization.*fp8/],
    ["a log level that there is not", node("--log-level", "loud"), /log-level/],
    ["an unknown command", ["nodes"], /unknown command nodes[^]*did you mean node\?/],
    ["no command", [], /meshnet COMMAND/],
    ["a prompt without a head", ["generate", "hi"], /neither --head nor --model-id[^]*--head URL/],
    ["a head that is no URL", ["generate", "hi", "--head", "x"], /--head x is not a URL/],
  ])("%s", async (_, words, says) => {
    const { code, stdout, stderr } = await run(words);
    expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
    expect(stderr).toMatch(says);
    expect(stderr).not.toMatch(/\n\s+at /); // a stack is for bugs
  });
});

describe("a model that cannot be used exits with 1 and says which file and why:", () => {
  test.each([
    ["a directory that is not there", "/nonexistent/model", /\/nonexistent\/model/],
    ["a file", join(TINY, "config.json"), /not a directory/],
    [
      "a directory without a config.json",
      broken("no-config", (d) => rmSync(join(d, "config.json"))),
      /no config\.json/,
    ],
    ["an empty directory", emptyDirectory(), /no config\.json/],
    [
      "a config.json that is not JSON",
      broken("bad-json", (d) => writeFileSync(join(d, "config.json"), "{")),
      /config\.json is not JSON/,
    ],
    ["no weights", broken("no-weights", (d) => rmSync(join(d, "model.safetensors"))), /model\.safetensors/],
    [
      "a truncated SafeTensors file",
      broken("short", (d) => truncateSync(join(d, "model.safetensors"), 1_000_000)),
      /model\.safetensors.*1000000|1,000,000/,
    ],
    [
      "weights that are no SafeTensors file",
      broken("noise", (d) => writeFileSync(join(d, "model.safetensors"), "hello")),
      /model\.safetensors/,
    ],
    ["an unknown model type", broken("type", setConfig("model_type", "gpt5")), /model_type "gpt5"/],
    [
      "an unknown activation",
      broken("activation", setConfig("activation_function", "mish")),
      /activation_function "mish"/,
    ],
    ["a config.json of another size", broken("size", setConfig("n_embd", 128)), /\[1024, 96\].*\[1024, 128\]/],
    ["a config.json with a string for a number", broken("kind", setConfig("n_layer", "four")), /"n_layer" is "four"/],
    [
      "a quantization that is not bitsandbytes'",
      broken("gptq", setConfig("quantization_config", { quant_method: "gptq" })),
      /quant_method "gptq"/,
    ],
    ["more layers than any model", broken("deep", setConfig("n_layer", 1_000_000)), /"n_layer" is 1000000/],
    [
      "an epsilon that cannot be",
      broken("epsilon", setConfig("layer_norm_epsilon", 1e300)),
      /"layer_norm_epsilon" is about 1\.000e\+300/,
    ],
    [
      "a config.json that is a pipe",
      broken(
        "pipe",
        replacedBy("config.json", (path) => void Bun.spawnSync(["mkfifo", path])),
      ),
      /config\.json.*not a file/,
    ],
    [
      "weights that are a link to themselves",
      broken(
        "loop",
        replacedBy("model.safetensors", (path) => symlinkSync(path, path)),
      ),
      /model\.safetensors/,
    ],
    [
      "a tokenizer whose added tokens are a number",
      broken(
        "added",
        setTokenizer((t) => (t.added_tokens = 5)),
      ),
      /added_tokens is not a list/,
    ],
    [
      "a tokenizer with an id of a billion",
      broken(
        "id",
        setTokenizer((t) => (t.model.vocab["T"] = 1e9)),
      ),
      /"T" has the id 1000000000/,
    ],
    [
      "a tokenizer with a merge of nothing",
      broken(
        "merge",
        setTokenizer((t) => (t.model.merges[3] = ["zz", "qq"])),
      ),
      /merge 3 is \["zz","qq"\]/,
    ],
    ["more layers than the file has", broken("layers", setConfig("n_layer", 5)), /h\.4\./],
    ["a head without a tokenizer", variant("bf16"), /tokenizer/],
    ["a missing shard", missingShard(), /model-0000\d-of-00002\.safetensors/],
  ])("%s", async (_, directory, says) => {
    const { code, stdout, stderr } = await run(model(directory));
    expect({ code, stdout, stderr: stderr.replace(/^\d.*\n/gm, "") }).toEqual({
      code: 1,
      stdout: "",
      stderr: expect.stringMatching(says),
    });
    expect(stderr).not.toMatch(/\n\s+at /);
  });

  function emptyDirectory(): string {
    const directory = join(folder.path, "empty");
    mkdirSync(directory);
    return directory;
  }

  function missingShard(): string {
    const directory = join(folder.path, "missing-shard");
    cpSync(variant("sharded"), directory, { recursive: true });
    rmSync(join(directory, "model-00002-of-00002.safetensors"));
    return directory;
  }
});

test("a port that is taken exits with 1 before anything is loaded", async () => {
  const other = Bun.serve({ port: 0, hostname: "127.0.0.1", fetch: () => new Response("") });
  const { port } = other;
  const { code, stderr } = await run(node("--port", `${port}`));
  await other.stop(true);
  expect(code).toBe(1);
  expect(stderr).toMatch(new RegExp(`port ${port} of 127.0.0.1 is taken`));
  expect(stderr).not.toMatch(/ device /);
});

test("a device that is not there exits with 1 and lists those that are", async () => {
  const { code, stderr } = await run(node("--port", "0", "--device", "voodoo"));
  expect({ code, stderr }).toEqual({ code: 1, stderr: expect.stringMatching(/voodoo[^]*SwiftShader/) });
});

test("--help of each command shows its flags and an example, without colours when it is not a terminal", async () => {
  for (const command of ["node", "generate", "chat", "cache", "bench"]) {
    const { code, stdout } = await run([command, "--help"]);
    expect({ command, code }).toEqual({ command, code: 0 });
    expect(stdout).toMatch(new RegExp(`EXAMPLES\\s+meshnet ${command}`));
    expect(stdout).not.toContain("\u001b");
  }
  const { version } = JSON.parse(readFileSync(join(import.meta.dir, "../../package.json"), "utf8"));
  expect(await run(["--version"])).toEqual({ code: 0, stdout: `${version}\n`, stderr: "" });
});

describe("what cannot be written to stdout is an error, 1, and not lost without a word:", () => {
  /** Puts stdout somewhere else. */
  const to = (place: string) => ({ wrapper: ["sh", "-c", `exec "$@" ${place}`, "sh"], env: { HOME: folder.path } });
  const plan = ["plan", "--model-id", TINY, "--nodes", "1GiB"];
  const commands: [name: string, words: string[]][] = [
    ["--version", ["--version"]],
    ["--help", ["--help"]],
    ["plan --help", ["plan", "--help"]],
    ["plan", plan],
    ["plan --json", [...plan, "--json"]],
    ["plan --json where nothing fits", ["plan", "--model-id", TINY, "--nodes", "1MiB", "--json"]],
    ["node --dry-run", node("--dry-run")],
    ["cache list", ["cache", "list"]],
    ["cache prune", ["cache", "prune"]],
    ["generate", ["generate", "a", "--model-id", TINY, "--log-level", "error", "--max-new-tokens", "2"]],
    ["generate --json", ["generate", "a", "--model-id", TINY, "--quiet", "--json", "--max-new-tokens", "2"]],
    ["verify", ["verify", "--model-id", TINY, "--quantization", "int8", "--max-context", "16", "--log-level", "error"]],
    ["bench kernels", ["bench", "kernels", "--shapes", "32x32", "--runs", "1", "--log-level", "error"]],
    ["bench load", ["bench", "load", "--model-id", TINY, "--runs", "1", "--log-level", "error"]],
    ["doctor", ["doctor", "--quick", "--offline"]],
    ["doctor --json", ["doctor", "--quick", "--offline", "--json"]],
  ];

  test.each(commands)(
    "%s, where there is no room",
    async (_, words) => {
      const { code, stderr } = await run(words, to("> /dev/full"));
      expect({ code, stderr }).toEqual({
        code: 1,
        stderr: expect.stringMatching(/written to stdout: .*no space left/),
      });
      expect(stderr).not.toMatch(/\n\s+at /);
    },
    60_000,
  );

  test.each(commands)("%s, where stdout is closed", async (_, words) => {
    const { code, stderr } = await run(words, to(">&-"));
    expect({ code, stderr }).toEqual({ code: 1, stderr: expect.stringMatching(/stdout is closed[^]*> FILE/) });
  });

  test("but not where it is given to nobody, or nobody reads on: the exit code is the command's", async () => {
    const words = ["cache", "list"];
    expect(await run(words, to("> /dev/null"))).toEqual({ code: 0, stdout: "", stderr: "" });
    const unread = { wrapper: ["bash", "-c", '"$@" | (exec <&-); exit "${PIPESTATUS[0]}"', "bash"] };
    expect(await run(["--help"], unread)).toEqual({ code: 0, stdout: "", stderr: "" });
    expect(await run(plan, unread)).toEqual({ code: 0, stdout: "", stderr: "" });
    expect((await run(["plan", "--model-id", TINY, "--nodes", "1MiB", "--json"], unread)).code).toBe(3);
  });
});

test("--dry-run refuses what a node refuses besides the memory: a head without a tokenizer", async () => {
  const words = ["node", "--model-id", variant("bf16"), "--dry-run"];
  const { code, stderr } = await run(words);
  expect({ code, stderr }).toEqual({ code: 1, stderr: expect.stringMatching(/tokenizer/) });
  expect((await run([...words, "--shard-start", "1"])).code).toBe(0);
});

test("--dry-run says what would be loaded, and loads nothing", async () => {
  const { code, stdout, stderr } = await run(node("--shard-start", "2", "--dry-run"));
  expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
  expect(stdout).toMatch(/layers\s+2-4/);
  expect(stdout).toMatch(/weights\s+layers 2-4, bfloat16\s+432\.0 KiB/); // 2 · (12 · 96² numbers) · 2 bytes
});

test("flags come from the environment, and the command line wins over it", async () => {
  const env = { MESHNET_MODEL_ID: TINY, MESHNET_SHARD_END: "9" };
  expect((await run(["node", "--dry-run"], { env })).code).toBe(2);
  const { code, stdout } = await run(["node", "--dry-run", "--shard-end", "3"], { env });
  expect({ code, stdout }).toEqual({ code: 0, stdout: expect.stringMatching(/layers\s+0-3/) });
});

test("a .env and a bunfig.toml in the user's folder are none of its business", async () => {
  writeFileSync(join(folder.path, ".env"), "MESHNET_SHARD_END=9\n");
  writeFileSync(join(folder.path, "bunfig.toml"), 'preload = ["./no-such-file.ts"]\n');
  expect((await run(node("--dry-run"), { cwd: folder.path })).code).toBe(0);
});

test("a node with a web page's Origin or a foreign Host is refused", async () => {
  await using running = new NodeProcess(["--model-id", TINY]);
  const url = await running.url;
  const ask = (headers: Record<string, string>) => fetch(`${url}forward`, { method: "POST", body: "hi", headers });
  expect((await ask({ "content-type": "text/plain", origin: "https://evil.example" })).status).toBe(403);
  expect((await ask({ "content-type": "text/plain", host: "evil.example" })).status).toBe(403);
  expect((await ask({ "content-type": "text/plain" })).status).toBe(200);
}, 60_000);
