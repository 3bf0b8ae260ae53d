import type { Device } from "../gpu/device.ts";
import * as kernels from "../kernels/index.ts";

/**
 * Two nodes with the same id give the same bits: it covers the encoding, every kernel's text (and with it the order of
 * addition), and the adapter with its driver.
 */
export function numericsId(device: Device, encoding: string): string {
  const { name, description, subgroupMinSize, subgroupMaxSize } = device.info;
  const hash = new Bun.CryptoHasher("sha256");
  hash.update(JSON.stringify([encoding, name, description, subgroupMinSize, subgroupMaxSize]));
  for (const source of sourcesIn(kernels)) hash.update(source);
  return hash.digest("hex").slice(0, 16);
}

function sourcesIn(node: unknown): string[] {
  if (typeof node !== "object" || node === null) return [];
  if ("source" in node && typeof node.source === "string") return [node.source];
  return Object.values(node).flatMap(sourcesIn);
}
