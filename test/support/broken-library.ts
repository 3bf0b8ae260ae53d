import { writeFileSync } from "node:fs";

/** xor eax, eax; mov [rax], eax: writes to address 0. */
const CRASH = [0x31, 0xc0, 0x89, 0x00];

/** A shared library for Linux x64 that loads well and then crashes in its initialisation, as a broken driver may. */
export function writeCrashingLibrary(path: string): void {
  const file = new DataView(new ArrayBuffer(SIZE));
  const bytes = new Uint8Array(file.buffer);
  bytes.set([0x7f, 0x45, 0x4c, 0x46, 2, 1, 1]); // ELF, 64 bits, little-endian
  file.setUint16(16, 3, true); // a shared object
  file.setUint16(18, 62, true); // of x86-64
  file.setUint32(20, 1, true);
  file.setBigUint64(32, 64n, true); // the program headers are behind this header
  file.setUint16(52, 64, true);
  file.setUint16(54, 56, true);
  file.setUint16(56, 2, true);
  const segment = (at: number, type: number, offset: number, size: number) => {
    file.setUint32(at, type, true);
    file.setUint32(at + 4, 7, true); // the linker writes into the dynamic section, and the code runs
    for (const field of [8, 16, 24]) file.setBigUint64(at + field, BigInt(offset), true);
    for (const field of [32, 40]) file.setBigUint64(at + field, BigInt(size), true);
    file.setBigUint64(at + 48, 4096n, true);
  };
  segment(64, 1, 0, SIZE); // loaded whole
  segment(120, 2, DYNAMIC, 16 * ENTRIES.length);
  ENTRIES.forEach(([tag, value], index) => {
    file.setBigUint64(DYNAMIC + index * 16, BigInt(tag), true);
    file.setBigUint64(DYNAMIC + index * 16 + 8, BigInt(value), true);
  });
  bytes.set(CRASH, CODE);
  writeFileSync(path, bytes, { mode: 0o755 });
}

const SIZE = 4096;
const DYNAMIC = 512;
const NAMES = 1024; // an empty string
const SYMBOLS = 1040; // the one empty symbol
const HASH = 1088; // a table of one bucket, all zeros
const CODE = 2048;

/** The dynamic section: string table, its size, symbols, the size of one, hash table, initialisation, end. */
const ENTRIES: readonly (readonly [tag: number, value: number])[] = [
  [5, NAMES],
  [10, 1],
  [6, SYMBOLS],
  [11, 24],
  [4, HASH],
  [12, CODE],
  [0, 0],
];
