import { quote } from "../base/quote.ts";
import { malformed, PROTOCOL_VERSION } from "./headers.ts";

/** `GET /info`: what a node is, for the node before it and for people. */
export interface NodeInfo {
  /** protocol version */
  readonly v: number;
  /** Instance id: another one after a restart. */
  readonly node: string;
  readonly model_id: string;
  readonly revision: string | null;
  /** model digest */
  readonly model: string;
  /** tokenizer digest; a head has one */
  readonly tokenizer: string | null;
  /** layers of the whole model */
  readonly layers: number;
  readonly start: number;
  readonly end: number;
  readonly quantization: string;
  readonly numerics: string;
  readonly hidden_size: number;
  readonly vocab_size: number;
  /** Tokens of the longest sequence that this node and those after it take, as far as it knows them. */
  readonly max_context: number;
  readonly max_sessions: number;
  readonly max_rows: number;
  /** Of a `POST /forward`. */
  readonly max_body_bytes?: number;
  readonly device: string;
  /** Bytes of the weights that a pass of one token reads: with the time of such a pass, how fast the node is. */
  readonly weight_bytes_per_token?: number;
  readonly memory: MemoryInfo;
  readonly cache?: CacheInfo;
  readonly work?: WorkInfo;
  /** A head's. */
  readonly texts?: TextsInfo;
  readonly next: string | null;
}

/** The room for sessions, in pages of tokens, and how often a session began with tokens that were there already. */
export interface CacheInfo {
  readonly page_tokens: number;
  readonly pages: number;
  /** Promised to open sessions. */
  readonly reserved_pages: number;
  readonly sessions: number;
  readonly prefix_hits: number;
  readonly prefix_tokens: number;
}

/** Passes through the node's layers since it opened its device, and the milliseconds in them. */
export interface WorkInfo {
  readonly passes: number;
  readonly pass_ms: number;
}

/** What the model is for texts. */
export interface TextsInfo {
  /** It has a chat template. */
  readonly chat: boolean;
  /** Its generation_config.json asks for tokens that are drawn. */
  readonly do_sample: boolean;
}

/** Bytes of device memory: what the plan says, what is taken, what is free (null where nobody can tell). */
export interface MemoryInfo {
  readonly planned: number;
  readonly allocated: number;
  readonly available: number | null;
  /** `--memory-limit`, where one was given: the most that meshnet itself may have of the device. What its driver takes is beside it. */
  readonly limit?: number;
  /** With a limit: what the device itself has free, whatever the limit leaves of it. */
  readonly device_available?: number | null;
}

/**
 * Checks what admission reads, and nothing else; of another protocol version, nothing but that. Throws UserError
 * `malformed`.
 */
export function parseInfo(text: string): NodeInfo {
  let info: Record<string, unknown> | null;
  try {
    info = JSON.parse(text);
  } catch (cause) {
    throw malformed("its /info is not JSON", "is it a meshnet node?", { cause });
  }
  if (Number.isSafeInteger(info?.["v"]) && info?.["v"] !== PROTOCOL_VERSION) return info as unknown as NodeInfo;
  const wanted = { node: "string", model: "string", model_id: "string" } as const;
  const counts = ["v", "start", "end", "layers", "hidden_size", "vocab_size"];
  const odd =
    Object.entries(wanted).find(([key, type]) => typeof info?.[key] !== type)?.[0] ??
    counts.find((key) => !Number.isSafeInteger(info?.[key]));
  if (odd === undefined) return info as unknown as NodeInfo;
  throw malformed(`its /info has ${odd} ${quote(info?.[odd])}`, "is it a meshnet node?");
}
