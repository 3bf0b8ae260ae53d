/** What the plainest reader makes of a file's entry. */
export interface PlainEntry {
  dtype: string;
  shape: number[];
  begin: number;
  end: number;
}

const BITS: Record<string, number> = Object.fromEntries(
  Object.entries({
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
  }).flatMap(([bits, names]) => names.split(" ").map((name) => [name, Number(bits)])),
);

/**
 * The tensors of a whole SafeTensors file, or undefined where it breaks a rule. As lenient as `JSON.parse`: of two equal
 * keys the last counts, and 4.0 is 4. Every byte of the data is marked by the tensor that has it.
 */
export function plainTable(file: Uint8Array): Map<string, PlainEntry> | undefined {
  if (file.length < 8) return undefined;
  const length = new DataView(file.buffer, file.byteOffset).getBigUint64(0, true);
  if (length > 100_000_000n || 8n + length > BigInt(file.length)) return undefined;
  const start = 8 + Number(length);
  const header = parse(file.subarray(8, start));
  if (!isObject(header) || !isMetadata(header["__metadata__"])) return undefined;

  const table = new Map<string, PlainEntry>();
  const owners = new Uint8Array(file.length - start);
  for (const [name, value] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const entry = plainEntry(value);
    if (!entry) return undefined;
    table.set(name, { ...entry, begin: start + entry.begin, end: start + entry.end });
    if (entry.begin > owners.length || entry.end > owners.length) return undefined;
    for (let at = entry.begin; at < entry.end; at++) if (owners[at]!++ > 0) return undefined;
  }
  // Nor may an empty tensor stand in the middle of another.
  const borders = new Set([start, ...[...table.values()].flatMap(({ begin, end }) => (end > begin ? [end] : []))]);
  const isTiled = owners.every((count) => count === 1) && [...table.values()].every(({ begin }) => borders.has(begin));
  return isTiled ? table : undefined;
}

function plainEntry(value: unknown): PlainEntry | undefined {
  const fields = Array.isArray(value) && value.length === 3 ? value : isObject(value) ? inOrder(value) : [];
  const [dtype, shape, offsets] = fields as [string, number[], [number, number]];
  if (typeof dtype !== "string" || !Object.hasOwn(BITS, dtype)) return undefined;
  if (!isCounts(shape) || !isCounts(offsets) || offsets.length !== 2) return undefined;
  const [begin, end] = offsets;
  const bits = shape.reduce((product, size) => product * BigInt(size), BigInt(BITS[dtype]!));
  return bits === BigInt(end - begin) * 8n ? { dtype, shape, begin, end } : undefined;
}

const inOrder = (entry: Record<string, unknown>) => ["dtype", "shape", "data_offsets"].map((field) => entry[field]);

const isCounts = (value: unknown): boolean =>
  Array.isArray(value) && value.every((item) => Number.isSafeInteger(item) && item >= 0);

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

const isMetadata = (value: unknown): boolean =>
  value === undefined ||
  value === null ||
  (isObject(value) && Object.values(value).every((v) => typeof v === "string"));

function parse(bytes: Uint8Array): unknown {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch {
    return undefined;
  }
}
