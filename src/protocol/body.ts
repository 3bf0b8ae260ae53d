import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";

/**
 * Reads a body of at most `limit` bytes. A declared length above it is refused before anything is read, an undeclared
 * one while it comes. `what`: for the message, e.g. "the body". Throws UserError `too_large`.
 */
export async function readBody(message: Request | Response, limit: number, what: string): Promise<Uint8Array> {
  const declared = Number(message.headers.get("Content-Length") ?? 0);
  if (declared > limit) throw tooLarge(what, `has ${formatBytes(declared)}`, limit);
  const chunks: Uint8Array[] = [];
  let length = 0;
  for await (const chunk of (message.body ?? []) as AsyncIterable<Uint8Array>) {
    length += chunk.length;
    if (length > limit) throw tooLarge(what, `has more than ${formatBytes(limit)}`, limit);
    chunks.push(chunk);
  }
  return chunks.length === 1 ? chunks[0]! : join(chunks, length);
}

function join(chunks: readonly Uint8Array[], length: number): Uint8Array {
  const bytes = new Uint8Array(length);
  let at = 0;
  for (const chunk of chunks) {
    bytes.set(chunk, at);
    at += chunk.length;
  }
  return bytes;
}

function tooLarge(what: string, found: string, limit: number): UserError {
  return new UserError(
    "too_large",
    `${what} ${found}, and the limit is ${formatBytes(limit)}`,
    "send fewer tokens in one call",
  );
}
