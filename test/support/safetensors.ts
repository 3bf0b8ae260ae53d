import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export { seededRandom } from "../../src/engine/self-test/sampler.ts";

export interface SourceTensor {
  dtype: string;
  shape: number[];
  data: Uint8Array;
}

/** A SafeTensors file of these tensors, in their order. */
export function safetensorsFile(tensors: Record<string, SourceTensor>): Uint8Array {
  const header: Record<string, unknown> = { __metadata__: { format: "pt" } };
  let at = 0;
  for (const [name, { dtype, shape, data }] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [at, (at += data.length)] };
  }
  return fileWithHeader(JSON.stringify(header), ...Object.values(tensors).map(({ data }) => data));
}

/** A file with exactly this header text, or header bytes, valid or not. */
export function fileWithHeader(header: string | Uint8Array, ...data: Uint8Array[]): Uint8Array {
  const text = typeof header === "string" ? new TextEncoder().encode(header) : header;
  const length = new Uint8Array(8);
  new DataView(length.buffer).setBigUint64(0, BigInt(text.length), true);
  return new Uint8Array(Buffer.concat([length, text, ...data]));
}

export interface TemporaryFolder extends Disposable {
  readonly path: string;
}

/** A folder that is gone at the end of its scope: `using folder = temporaryFolder()`. */
export function temporaryFolder(): TemporaryFolder {
  const path = mkdtempSync(join(tmpdir(), "meshnet-test-"));
  return { path, [Symbol.dispose]: () => rmSync(path, { recursive: true, force: true }) };
}
