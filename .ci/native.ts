/**
 * Prepares `dist/native/linux-x64/`: the libraries a Linux x64 binary embeds so that it runs on a machine with nothing
 * but a C library. SwiftShader and the Vulkan loader come out of an npm package that ships them (its checksum is in
 * package-lock.json), the GCC runtime from this machine: a binary for others is best built on the oldest distribution
 * that has GCC 12's, since the runtime may need that distribution's glibc. The names end in `.so` because
 * `src/assets.d.ts` declares those; a library is found by the SONAME inside it.
 */
import { $ } from "bun";
import { existsSync } from "node:fs";
import { copyFile, mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { brotliDecompressSync } from "node:zlib";

const ROOT = join(import.meta.dir, "..");
const OUT = join(ROOT, "dist/native/linux-x64");

/** Written last, so that an interrupted preparation is repeated. `.ci/setup` looks for it too. */
const COMPLETE = join(OUT, "complete");

export const nativeIsComplete = (): boolean => existsSync(COMPLETE);

export async function prepareNative(): Promise<void> {
  await mkdir(OUT, { recursive: true });
  await extractSwiftShader();
  await copyFile(await systemLibrary("libstdc++.so.6"), join(OUT, "libstdcxx.so"));
  await copyFile(await systemLibrary("libgcc_s.so.1"), join(OUT, "libgcc_s.so"));
  await writeFile(COMPLETE, "");
}

async function extractSwiftShader(): Promise<void> {
  const archive = join(ROOT, "node_modules/@sparticuz/chromium/bin/swiftshader.tar.br");
  const scratch = await mkdtemp(join(tmpdir(), "meshnet-native-"));
  try {
    await writeFile(join(scratch, "all.tar"), brotliDecompressSync(await readFile(archive)));
    await $`tar -xf all.tar libvk_swiftshader.so libvulkan.so.1`.cwd(scratch);
    await copyFile(join(scratch, "libvk_swiftshader.so"), join(OUT, "libvk_swiftshader.so"));
    await copyFile(join(scratch, "libvulkan.so.1"), join(OUT, "libvulkan.so"));
  } finally {
    await rm(scratch, { recursive: true });
  }
}

/** Where the dynamic linker finds `name`. The folders are Debian's, Fedora's and Arch's. */
async function systemLibrary(name: string): Promise<string> {
  const folders = ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"];
  const found = folders.map((folder) => join(folder, name)).find(existsSync);
  if (!found)
    throw new Error(`${name} is in none of ${folders.join(", ")}; install GCC's runtime (Debian: libstdc++6)`);
  return found;
}

if (import.meta.main) await prepareNative();
