import { dlopen, ptr, type Pointer } from "bun:ffi";

/**
 * The C library, for the few things JavaScript cannot ask of the system: an environment variable that native code
 * sees (`process.env.X = …` never reaches getenv), a file descriptor put in another's place.
 * Opened at the first call. Throws on Windows, which has no libc: ask `hasLibc` first.
 */
export function libc() {
  return (opened ??= dlopen(libraryName(), SYMBOLS).symbols);
}

export const hasLibc = process.platform === "linux" || process.platform === "darwin";

/** A zero-terminated copy of `text`. Keep the result referenced until the call that reads it has returned. */
export const cString = (text: string): Uint8Array => new TextEncoder().encode(`${text}\0`);

/** An anonymous file in memory, not inherited by children; it lives as long as its descriptor is open. Linux only. */
export function memfdCreate(name: string): number {
  linuxOnly ??= dlopen(libraryName(), { memfd_create: { args: ["ptr", "u32"], returns: "i32" } }).symbols;
  const fd = linuxOnly.memfd_create(ptr(cString(name)), MFD_CLOEXEC);
  if (fd < 0) throw new Error(`memfd_create("${name}") failed`);
  return fd;
}

const MFD_CLOEXEC = 1;

const SYMBOLS = {
  dlopen: { args: ["ptr", "i32"], returns: "ptr" },
  dlerror: { args: [], returns: "cstring" },
  setenv: { args: ["ptr", "ptr", "i32"], returns: "i32" },
  unsetenv: { args: ["ptr"], returns: "i32" },
  dup: { args: ["i32"], returns: "i32" },
  dup2: { args: ["i32", "i32"], returns: "i32" },
  usleep: { args: ["u32"], returns: "i32" },
} as const;

let opened: ReturnType<typeof dlopen<typeof SYMBOLS>>["symbols"] | undefined;
let linuxOnly: { memfd_create: (name: Pointer, flags: number) => number } | undefined;

function libraryName(): string {
  switch (process.platform) {
    case "linux":
      return "libc.so.6";
    case "darwin":
      return "libSystem.B.dylib";
    default:
      throw new Error(`no C library is known for ${process.platform}`);
  }
}
