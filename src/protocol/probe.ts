import { formatBytes } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { quote } from "../base/quote.ts";
import { malformed } from "./headers.ts";

/** The most bytes of a `POST /probe`, whose sender times how long they take to arrive. */
export const MAX_PROBE_BYTES = 16 << 20;

/** The answer: how many came. */
export interface ProbeReply {
  readonly bytes: number;
}

/** Counts the bytes of a probe as they come, and keeps none. Throws UserError `too_large`. */
export async function countProbe(message: Request): Promise<ProbeReply> {
  let bytes = 0;
  for await (const chunk of (message.body ?? []) as AsyncIterable<Uint8Array>) {
    bytes += chunk.length;
    if (bytes > MAX_PROBE_BYTES) {
      throw new UserError(
        "too_large",
        `the probe has more than ${formatBytes(MAX_PROBE_BYTES)}`,
        "a smaller one tells as much",
      );
    }
  }
  return { bytes };
}

/** Throws UserError `malformed`. */
export function parseProbeReply(text: string, sentBytes: number): void {
  let reply: Partial<ProbeReply> | null;
  try {
    reply = JSON.parse(text);
  } catch (cause) {
    throw malformed("its answer to a probe is not JSON", "is it a meshnet node?", { cause });
  }
  if (reply?.bytes === sentBytes) return;
  throw malformed(
    `of ${sentBytes} bytes it counted ${quote(reply?.bytes)}`,
    "is something on the way that changes what is sent?",
  );
}
