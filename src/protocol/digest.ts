import { UserError } from "../base/errors.ts";
import { quote } from "../base/quote.ts";
import { crc32cHex } from "./crc32c.ts";
import { malformed } from "./headers.ts";

const RESEND = "the body changed on its way: send it again";

/** Compares a body with its `Content-Digest` (RFC 9530), of which sha-256 is read and other algorithms are ignored. */
export function checkContentDigest(headers: Headers, body: Uint8Array): void {
  const text = headers.get("Content-Digest");
  if (text === null) return;
  const entry = text.split(",").find((part) => part.trim().toLowerCase().startsWith("sha-256="));
  if (entry === undefined) return;
  const said = /^sha-256=:([A-Za-z0-9+/]{43}=):$/i.exec(entry.trim())?.[1];
  if (said === undefined) {
    throw malformed(`header Content-Digest is ${quote(text)}`, "write it as sha-256=:<base64 of 32 bytes>:");
  }
  const found = new Bun.CryptoHasher("sha256").update(body).digest("base64");
  if (found === said) return;
  throw new UserError(
    "corrupt",
    `Content-Digest says sha-256 ${said}, and the ${body.length} bytes of the body have ${found}`,
    RESEND,
  );
}

/** `data`: what follows the header of a container. */
export function checkCrc32c(said: string | undefined, data: Uint8Array): void {
  if (said === undefined) return;
  if (!/^[0-9a-f]{8}$/i.test(said)) throw malformed(`metadata crc32c is ${quote(said)}`, "give 8 hex digits");
  const found = crc32cHex(data);
  if (found === said.toLowerCase()) return;
  throw new UserError(
    "corrupt",
    `metadata crc32c is ${said}, and the ${data.length} bytes of data have ${found}`,
    RESEND,
  );
}
