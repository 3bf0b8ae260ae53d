import { roundUp, sum, bytesOf } from "../base/bytes.ts";
import { messageOf } from "../base/errors.ts";
import { parseHeader } from "../safetensors/header.ts";
import { type Metadata, malformed } from "./headers.ts";

export const CONTAINER_TYPE = "application/x-safetensors";

export type ContainerDtype = "BF16" | "I32" | "U8";
const BYTES: Record<ContainerDtype, number> = { BF16: 2, I32: 4, U8: 1 };

export interface ContainerTensor {
  readonly name: string;
  readonly dtype: ContainerDtype;
  readonly shape: readonly number[];
  /** C-order, little-endian. */
  readonly data: ArrayBufferView;
}

export interface Container {
  readonly metadata: Metadata;
  readonly tensors: ReadonlyMap<string, { dtype: string; shape: readonly number[]; data: Uint8Array }>;
  /** All that follows the header: what `crc32c` is taken of. */
  readonly data: Uint8Array;
}

/** A SafeTensors buffer. The widest dtype comes first and the data begins at a multiple of 8, so that all is aligned. */
export function encodeContainer(tensors: readonly ContainerTensor[], metadata: Metadata = {}): Uint8Array {
  const ordered = [...tensors].sort((a, b) => BYTES[b.dtype] - BYTES[a.dtype]);
  const header: Record<string, unknown> = { __metadata__: metadata };
  let at = 0;
  for (const { name, dtype, shape, data } of ordered) {
    header[name] = { dtype, shape, data_offsets: [at, (at += data.byteLength)] };
  }
  const json = new TextEncoder().encode(JSON.stringify(header));
  const headerLength = roundUp(json.length, 8);

  const bytes = new Uint8Array(8 + headerLength + sum(ordered.map(({ data }) => data.byteLength)));
  new DataView(bytes.buffer).setBigUint64(0, BigInt(headerLength), true);
  bytes.set(json, 8);
  bytes.fill(0x20, 8 + json.length, 8 + headerLength); // the format pads with spaces
  let offset = 8 + headerLength;
  for (const { data } of ordered) {
    bytes.set(bytesOf(data), offset);
    offset += data.byteLength;
  }
  return bytes;
}

/** Throws UserError `malformed`. The tensors are views into `bytes`, at whatever alignment the sender chose. */
export function decodeContainer(bytes: Uint8Array): Container {
  const tensors = new Map<string, { dtype: string; shape: readonly number[]; data: Uint8Array }>();
  for (const { name, dtype, shape, begin, end } of parseEntries(bytes).values()) {
    tensors.set(name, { dtype, shape, data: bytes.subarray(begin, end) });
  }
  const dataStart = 8 + Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, dataStart))) as { __metadata__?: Metadata };
  return { metadata: header.__metadata__ ?? {}, tensors, data: bytes.subarray(dataStart) };
}

function parseEntries(bytes: Uint8Array) {
  try {
    return parseHeader(bytes, bytes.length, "the container");
  } catch (cause) {
    throw malformed(messageOf(cause), "send a SafeTensors buffer: header length, JSON header, data", { cause });
  }
}
