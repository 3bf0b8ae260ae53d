import { CFunction, CString, dlopen, JSCallback, type Pointer, ptr, toArrayBuffer } from "bun:ffi";
import { realpathSync } from "node:fs";
import { cString, libc } from "../base/libc.ts";
import { memoryFile, preload } from "./native-library.ts";

/**
 * Which of several equal devices comes first. Dawn opens a device by its name and takes the first of that name, and Vulkan
 * has no setting that tells two equal GPUs apart. But Dawn asks a library called libvulkan.so.1, and one of that name that is
 * there already is taken: this makes one in memory, whose single symbol is a function of ours. It passes everything on to
 * the real loader, and only the list of devices comes back in another order.
 *
 * Has to be called before anything loads Vulkan; false where that is too late, or no Vulkan is installed. Linux with glibc only.
 */
export async function reorderDevices(): Promise<boolean> {
  return (installed ??= install());
}

/** From now on the device with this name and place among equals is the first of its name. */
export function putFirst(name: string, nameIndex: number): void {
  wanted = { name, nameIndex };
}

const SONAME = "libvulkan.so.1";
let installed: Promise<boolean> | undefined;
let wanted = { name: "", nameIndex: 0 };

async function install(): Promise<boolean> {
  if (process.platform !== "linux" || isLoaded()) return false;
  const path = loaderPath();
  if (!path) return false;
  // The real loader has the same name, and of two that are there the one that came first is taken: so it comes second.
  let real: Loader | undefined;
  const callback = new JSCallback(
    (instance: Pointer | null, name: Pointer) => {
      const found = real!.vkGetInstanceProcAddr(instance, name) as Pointer | null;
      const isOurs = found && new CString(name).toString() === "vkEnumeratePhysicalDevices";
      return isOurs ? enumeration(real!, found) : found;
    },
    { args: ["ptr", "ptr"], returns: "ptr" },
  );
  keep.push(callback);
  const ours = sharedObject("vkGetInstanceProcAddr", Number(callback.ptr));
  if (!preload(await memoryFile(new Blob([ours])))) return false;
  realLoader = path; // by its name it would be ours
  real = dlopen(path, SYMBOLS).symbols;
  return true;
}

/** Under what the real loader is found by those who want it as it is. */
export const vulkanLoader = (): string => realLoader;

let realLoader = SONAME;

/** Native code calls them for as long as the process lives. */
const keep: JSCallback[] = [];

const RTLD_LAZY_NOLOAD = 0x1 | 0x4;

const isLoaded = (): boolean => libc().dlopen(ptr(cString(SONAME)), RTLD_LAZY_NOLOAD) !== null;

const SYMBOLS = {
  vkGetInstanceProcAddr: { args: ["ptr", "ptr"], returns: "ptr" },
  vkGetPhysicalDeviceProperties: { args: ["ptr", "ptr"], returns: "void" },
} as const;

type Loader = ReturnType<typeof dlopen<typeof SYMBOLS>>["symbols"];

function loaderPath(): string | undefined {
  for (const folder of FOLDERS) {
    try {
      return realpathSync(`${folder}/${SONAME}`);
    } catch {
      continue;
    }
  }
  return undefined;
}

const FOLDERS = [
  ...(process.env["LD_LIBRARY_PATH"] ?? "").split(":").filter(Boolean),
  ...(process.arch === "x64" ? ["/usr/lib/x86_64-linux-gnu"] : ["/usr/lib/aarch64-linux-gnu"]),
  "/usr/lib64",
  "/usr/lib",
  "/usr/local/lib",
];

const enumerations = new Map<Pointer, Pointer>();

function enumeration(loader: Loader, real: Pointer): Pointer {
  const known = enumerations.get(real);
  if (known) return known;
  const enumerate = CFunction({ ptr: real, args: ["ptr", "ptr", "ptr"], returns: "i32" });
  const callback = new JSCallback(
    (instance: Pointer, count: Pointer, devices: Pointer | null) => {
      const result = enumerate(instance, count, devices) as number;
      if (devices) reorder(loader, new BigUint64Array(toArrayBuffer(devices, 0, 8 * countAt(count))));
      return result;
    },
    { args: ["ptr", "ptr", "ptr"], returns: "i32" },
  );
  keep.push(callback);
  enumerations.set(real, callback.ptr!);
  return callback.ptr!;
}

const countAt = (count: Pointer): number => new Uint32Array(toArrayBuffer(count, 0, 4))[0]!;

function reorder(loader: Loader, devices: BigUint64Array): void {
  const places = [...devices.keys()].filter((place) => nameOf(loader, devices[place]!) === wanted.name);
  const from = places[wanted.nameIndex];
  const to = places[0];
  if (from === undefined || to === undefined) return;
  const first = devices[from]!;
  devices[from] = devices[to]!;
  devices[to] = first;
}

/** VkPhysicalDeviceProperties has 824 bytes, and the name at 20. */
function nameOf({ vkGetPhysicalDeviceProperties }: Loader, device: bigint): string {
  const properties = new Uint8Array(1024);
  vkGetPhysicalDeviceProperties(Number(device) as Pointer, ptr(properties));
  return new TextDecoder().decode(properties.subarray(20, properties.indexOf(0, 20)));
}

/** An ELF file with the SONAME of the loader and one symbol, which has an absolute address (glibc 2.28): no code at all. */
function sharedObject(symbol: string, address: number): Uint8Array<ArrayBuffer> {
  const PAGE = 0x10000; // the largest there is, so that it fits every kernel
  const strings = `\0${symbol}\0${SONAME}\0`;
  const at = { hash: 0x100, symbols: 0x120, strings: 0x160, dynamic: PAGE };
  const bytes = new Uint8Array(PAGE + 0x100);
  const view = new DataView(bytes.buffer);
  const u16 = (offset: number, value: number) => view.setUint16(offset, value, true);
  const u32 = (offset: number, ...values: number[]) =>
    values.forEach((v, i) => view.setUint32(offset + 4 * i, v, true));
  const u64 = (offset: number, ...values: number[]) =>
    values.forEach((v, i) => view.setBigUint64(offset + 8 * i, BigInt(v), true));

  bytes.set([0x7f, 0x45, 0x4c, 0x46, 2, 1, 1]); // ELF, 64 bits, little endian
  u16(16, 3); // ET_DYN
  u16(18, process.arch === "x64" ? 62 : 183); // EM_X86_64, EM_AARCH64
  u32(20, 1);
  u64(32, 64); // program headers
  u16(52, 64);
  u16(54, 56);
  u16(56, 4);
  u16(58, 64);
  const DYNAMIC_BYTES = 16 * 7;
  const program = (index: number, type: number, flags: number, offset: number, size: number, align: number) => {
    u32(64 + 56 * index, type, flags);
    u64(64 + 56 * index + 8, offset, offset, offset, size, size, align);
  };
  program(0, 1, 4, 0, at.strings + strings.length, PAGE); // PT_LOAD, read
  program(1, 1, 6, at.dynamic, DYNAMIC_BYTES, PAGE); // PT_LOAD, read and write: the linker writes into it
  program(2, 2, 6, at.dynamic, DYNAMIC_BYTES, 8); // PT_DYNAMIC
  program(3, 0x6474e551, 6, 0, 0, 16); // PT_GNU_STACK, not executable

  u32(at.hash, 1, 2, 1, 0, 0); // one bucket, two symbols, the bucket begins with symbol 1
  const GLOBAL_FUNCTION = 0x12;
  const ABSOLUTE = 0xfff1;
  u32(at.symbols + 24, 1);
  bytes[at.symbols + 28] = GLOBAL_FUNCTION;
  u16(at.symbols + 30, ABSOLUTE);
  u64(at.symbols + 32, address, 0);
  bytes.set(new TextEncoder().encode(strings), at.strings);
  const DYNAMIC = { hash: 4, strings: 5, symbols: 6, stringBytes: 10, symbolBytes: 11, soname: 14 };
  u64(at.dynamic, DYNAMIC.hash, at.hash, DYNAMIC.strings, at.strings, DYNAMIC.symbols, at.symbols);
  u64(at.dynamic + 48, DYNAMIC.stringBytes, strings.length, DYNAMIC.symbolBytes, 24, DYNAMIC.soname, 2 + symbol.length);
  return bytes; // the dynamic section ends with zeros
}
