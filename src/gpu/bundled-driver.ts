import { ptr } from "bun:ffi";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { messageOf } from "../base/errors.ts";
import { cString, libc } from "../base/libc.ts";
import { bundledLibrary, preload } from "./native-library.ts";
import { DRIVER_VARIABLES } from "./vulkan-drivers.ts";

/**
 * Runs `open` while SwiftShader, the software GPU that the binary carries, is the only Vulkan driver there is, and
 * resolves to undefined where none is bundled. An adapter that `open` got keeps working afterwards, next to adapters
 * of installed drivers; but nothing else may ask for an adapter meanwhile, since the choice is made by environment
 * variables of the process.
 *
 * Throws when no folder is writable: the Vulkan loader reads a driver's description from a file only.
 */
export async function withBundledDriver<T>(open: () => Promise<T>): Promise<T | undefined> {
  const driver = await bundledLibrary("swiftshader");
  if (!driver) return undefined;
  if (!preload("libvulkan.so.1")) {
    const loader = await bundledLibrary("vulkan"); // has the same SONAME, so Dawn finds it already loaded
    if (loader) preload(loader);
  }
  const folder = writableFolder();
  try {
    const description = join(folder, "swiftshader.json");
    writeFileSync(
      description,
      JSON.stringify({ file_format_version: "1.0.0", ICD: { library_path: driver, api_version: "1.1.0" } }),
    );
    for (const name of DRIVER_VARIABLES) setEnvironment(name, description);
    return await open();
  } finally {
    for (const name of DRIVER_VARIABLES) setEnvironment(name, process.env[name]);
    rmSync(folder, { recursive: true, force: true });
  }
}

/** In native code's environment; `process.env` keeps what the process was started with. */
function setEnvironment(name: string, value: string | undefined): void {
  if (value === undefined) libc().unsetenv(ptr(cString(name)));
  else libc().setenv(ptr(cString(name)), ptr(cString(value)), 1);
}

function writableFolder(): string {
  for (const parent of temporaryFolders()) {
    try {
      return mkdtempSync(join(parent, FOLDER_NAME));
    } catch {
      continue; // missing, read-only or full
    }
  }
  throw new Error(`no folder is writable (tried ${temporaryFolders().join(", ")}); set TMPDIR to one that is`);
}

const FOLDER_NAME = "meshnet-vulkan-";

const temporaryFolders = (): string[] =>
  [process.env.TMPDIR, "/tmp", "/dev/shm", process.env.XDG_RUNTIME_DIR, join(homedir(), ".cache")].flatMap(
    (folder) => folder || [],
  );

/** The folders that are tried for the driver's description, in order, and why one cannot be written. */
export function writableFolders(): { readonly path: string; readonly problem: string | undefined }[] {
  return temporaryFolders().map((path) => {
    try {
      rmSync(mkdtempSync(join(path, FOLDER_NAME)), { recursive: true });
      return { path, problem: undefined };
    } catch (error) {
      return { path, problem: messageOf(error) };
    }
  });
}
