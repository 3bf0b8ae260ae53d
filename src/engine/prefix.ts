import { createHash } from "node:crypto";
import { bytesOf } from "../base/bytes.ts";

/**
 * What names a page of cached tokens: sha256 over the digest of the page before it and its own ids (int32, little-endian).
 * So it stands for every token from the sequence's first to the page's last.
 */
export function pageDigest(before: string | undefined, ids: Int32Array): string {
  return createHash("sha256")
    .update(before ?? "")
    .update(bytesOf(ids))
    .digest("hex");
}
