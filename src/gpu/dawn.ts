import { UserError, messageOf } from "../base/errors.ts";
import { bundledLibrary, memoryFile, preload } from "./native-library.ts";
import { easePolling } from "./polling.ts";

/** The WebGPU implementation: Chromium's Dawn as a native module (npm package webgpu). */
export interface Dawn {
  create(flags: string[]): GPU;
  globals: Record<string, unknown>;
}

/**
 * A new instance of WebGPU; `adapter=NAME` among the flags selects the adapters whose name contains NAME.
 * Throws UserError "no_device" where Dawn cannot be loaded. The first call loads it and makes WebGPU's global names
 * (`GPUBufferUsage`, `GPUMapMode`, …) available.
 */
export async function createGpu(flags: string[] = []): Promise<GPU> {
  const gpu = (await (loading ??= loadDawn())).create(flags);
  instances.push(gpu);
  return gpu;
}

/** How Dawn came into this process. */
export interface DawnOrigin {
  readonly from: "file" | "memory" | "memory with the bundled C++ runtime";
  /** Why the ways before it did not work. */
  readonly reasons: readonly string[];
}

/** Loads Dawn, and says how that went. Throws as `createGpu` does. */
export async function dawnOrigin(): Promise<DawnOrigin> {
  await (loading ??= loadDawn());
  return origin;
}

let origin: DawnOrigin = { from: "file", reasons: [] };

let loading: Promise<Dawn> | undefined;
/** Never let go: when an instance is garbage-collected, Bun crashes in whatever runs next. */
const instances: GPU[] = [];

async function loadDawn(): Promise<Dawn> {
  const dawn = await requireDawn().catch(loadFromMemory).catch(explain);
  Object.assign(globalThis, dawn.globals);
  easePolling(dawn.globals);
  return dawn;
}

/** Literal paths behind literal tests: the bundler keeps the target's branch only and embeds that one file. */
async function requireDawn(): Promise<Dawn> {
  if (process.platform === "linux" && process.arch === "x64")
    return require("../../node_modules/webgpu/dist/linux-x64/dawn.node");
  if (process.platform === "linux" && process.arch === "arm64")
    return require("../../node_modules/webgpu/dist/linux-arm64/dawn.node");
  if (process.platform === "darwin") return require("../../node_modules/webgpu/dist/darwin-universal/dawn.node");
  if (process.platform === "win32" && process.arch === "x64")
    return require("../../node_modules/webgpu/dist/win32-x64/dawn.node");
  throw new UserError(
    "no_device",
    `there is no GPU runtime (Dawn) for ${process.platform}-${process.arch}`,
    "run this node on Linux x64 or arm64, on macOS or on Windows x64; client commands work here too",
  );
}

/**
 * Bun unpacks an embedded module into the temporary folder. Where that folder is read-only, full, missing or mounted
 * noexec, and where the C++ runtime is missing or older than GCC 12's, a copy in memory and the bundled runtime help.
 */
async function loadFromMemory(error: unknown): Promise<Dawn> {
  const embedded = Bun.embeddedFiles.find((file) => /^dawn-.*\.node$/.test((file as File).name));
  if (process.platform !== "linux" || !embedded) throw error;
  const path = await memoryFile(embedded);
  origin = { from: "memory", reasons: [messageOf(error)] };
  try {
    return openModule(path);
  } catch (error) {
    if (needsNewerGlibc(error)) throw error;
    origin = { from: "memory with the bundled C++ runtime", reasons: [...origin.reasons, messageOf(error)] };
    for (const library of ["libgcc", "libstdcxx"] as const) {
      const bundled = await bundledLibrary(library);
      if (bundled) preload(bundled);
    }
    return openModule(path);
  }
}

function openModule(path: string): Dawn {
  const module = { exports: {} };
  process.dlopen(module, path);
  return module.exports as Dawn;
}

const needsNewerGlibc = (error: unknown): boolean => /GLIBC_\d/.test(messageOf(error));

function explain(error: unknown): never {
  if (error instanceof UserError) throw error;
  const cause = { cause: error };
  if (needsNewerGlibc(error))
    throw new UserError(
      "no_device",
      `the GPU runtime (Dawn) needs glibc 2.34, and this machine's is older: ${messageOf(error)}`,
      "use Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a container of one of these",
      cause,
    );
  throw new UserError(
    "no_device",
    `the GPU runtime (Dawn) cannot be loaded: ${messageOf(error)}`,
    "it needs glibc 2.34 and the C++ runtime of GCC 12 or newer (Debian: libstdc++6)",
    cause,
  );
}
