import { ptr } from "bun:ffi";
import { writeSync } from "node:fs";
import { cString, libc, memfdCreate } from "../base/libc.ts";

/**
 * The native libraries that a Linux x64 binary carries for machines that lack them. `.ci/native.ts` puts them into
 * `dist/native/linux-x64/` (from `.ci/setup`), the bundler embeds them from there, and for every other platform it
 * drops this branch. In a checkout without that folder an import fails when it is called, not before.
 */
const BUNDLED =
  process.platform === "linux" && process.arch === "x64"
    ? {
        swiftshader: () => import("../../dist/native/linux-x64/libvk_swiftshader.so", { with: { type: "file" } }),
        vulkan: () => import("../../dist/native/linux-x64/libvulkan.so", { with: { type: "file" } }),
        libstdcxx: () => import("../../dist/native/linux-x64/libstdcxx.so", { with: { type: "file" } }),
        libgcc: () => import("../../dist/native/linux-x64/libgcc_s.so", { with: { type: "file" } }),
      }
    : undefined;

export type BundledLibrary = "swiftshader" | "vulkan" | "libstdcxx" | "libgcc";

/** A bundled library as a path that the dynamic linker can open, or undefined where there is none. */
export const bundledLibrary = (name: BundledLibrary): Promise<string | undefined> => (opened[name] ??= open(name));

const opened: Partial<Record<BundledLibrary, Promise<string | undefined>>> = {};

async function open(name: BundledLibrary): Promise<string | undefined> {
  const imported = await BUNDLED?.[name]().catch(() => undefined);
  return imported && memoryFile(Bun.file(imported.default));
}

/**
 * A copy of `blob` in memory under a path that needs no writable folder. Its descriptor stays open for good: the
 * dynamic linker takes a second file under the same path for the library it already has.
 */
export async function memoryFile(blob: Blob): Promise<string> {
  const bytes = await blob.bytes();
  const fd = memfdCreate("meshnet");
  for (let offset = 0; offset < bytes.length;) offset += writeSync(fd, bytes, offset);
  return `/proc/self/fd/${fd}`;
}

/** Loads `path` so that later loads which ask for the same SONAME get this one. False when it cannot be loaded. */
export const preload = (path: string): boolean => libc().dlopen(ptr(cString(path)), RTLD_NOW | RTLD_GLOBAL) !== null;

/** Why `path` cannot be loaded, in the dynamic linker's words; undefined where it can, and is. */
export const loadProblem = (path: string): string | undefined =>
  preload(path) ? undefined : String(libc().dlerror() ?? `${path} cannot be loaded`);

const RTLD_NOW = 0x002;
const RTLD_GLOBAL = 0x100; // Linux's value
