/**
 * `bun .ci/build.ts [--target=bun-linux-arm64]`: compiles the single binary into `dist/`, unless nothing that goes into
 * it has changed. For another platform than this machine's, bun fetches that platform's runtime with its own npm client.
 */
import { $, Glob } from "bun";
import { existsSync } from "node:fs";
import { mkdir, readFile, stat, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { formatBytes } from "../src/base/bytes.ts";
import { nativeIsComplete, prepareNative } from "./native.ts";

const ROOT = join(import.meta.dir, "..");
const HOST = `bun-${process.platform === "win32" ? "windows" : process.platform}-${process.arch}`;

export async function build(target = HOST): Promise<string> {
  const name = target === HOST ? "meshnet" : target.replace("bun-", "meshnet-");
  const outfile = join(ROOT, "dist", target.includes("windows") ? `${name}.exe` : name);
  await mkdir(join(ROOT, "dist"), { recursive: true });
  if (target === "bun-linux-x64" && !nativeIsComplete()) await prepareNative();

  const stamp = `${outfile}.inputs`;
  const inputs = await hashOfInputs(target);
  if (existsSync(outfile) && existsSync(stamp) && (await readFile(stamp, "utf8")) === inputs) {
    console.log(`build: ${outfile} is up to date`);
    return outfile;
  }
  await compile(target, outfile);
  await writeFile(stamp, inputs);
  console.log(`build: ${outfile} (${formatBytes((await stat(outfile)).size)})`);
  return outfile;
}

async function compile(target: string, outfile: string): Promise<void> {
  const { exitCode, stderr } =
    await $`${process.execPath} build ${FLAGS} --target=${target} --outfile=${outfile} src/index.ts`
      .cwd(ROOT)
      .quiet()
      .nothrow();
  if (exitCode !== 0) throw new Error(`bun build exited with ${exitCode}:\n${stderr}`);
}

const FLAGS = [
  "--compile",
  "--minify",
  "--sourcemap", // gives stack traces of minified code their file and line back
  "--bytecode",
  "--format=esm", // bytecode alone means CommonJS, where a top-level await fails
  // Else the binary runs what a .env or a bunfig.toml in the user's current folder says.
  "--no-compile-autoload-dotenv",
  "--no-compile-autoload-bunfig",
];

async function hashOfInputs(target: string): Promise<string> {
  const hash = new Bun.CryptoHasher("sha256").update(`${target} ${Bun.version}\n`);
  const files = ["package.json", "package-lock.json", ".ci/build.ts"];
  for (const folder of ["src", "shaders", "dist/native"]) {
    files.push(...(await Array.fromAsync(new Glob(`${folder}/**/*`).scan(ROOT))));
  }
  for (const file of files.sort()) hash.update(`${file}\n`).update(await readFile(join(ROOT, file)));
  return hash.digest("hex");
}

if (import.meta.main) {
  const { values } = parseArgs({ options: { target: { type: "string" } } });
  await build(values.target);
}
