import { UserError } from "../base/errors.ts";
import { parseJson } from "../base/json.ts";
import { quote } from "../base/quote.ts";

export const PROTOCOL_VERSION = 1;

/** The headers of the contract. Those of a call have a twin in the metadata of a container (`CALL_FIELDS`). */
export const HEADERS = {
  version: "X-Meshnet-Version",
  shape: "X-Meshnet-Shape",
  attentionMask: "X-Meshnet-Attn-Mask",
  positionIds: "X-Meshnet-Position-Ids",
  fromLayer: "X-Meshnet-From-Layer",
  model: "X-Meshnet-Model",
  session: "X-Meshnet-Session",
  positionStart: "X-Meshnet-Pos-Start",
  maxLen: "X-Meshnet-Max-Len",
  step: "X-Meshnet-Step",
  want: "X-Meshnet-Want",
  sampling: "X-Meshnet-Sampling",
  route: "X-Meshnet-Route",
  deadlineMs: "X-Meshnet-Deadline-Ms",
  requestId: "X-Meshnet-Request-Id",
  // of a reply
  layers: "X-Meshnet-Layers",
  cacheLen: "X-Meshnet-Cache-Len",
  /** Who answers; in a request: the node that it is from. */
  node: "X-Meshnet-Node",
  numerics: "X-Meshnet-Numerics",
} as const;

/** What is said once for a whole call, and the metadata key of each. */
const CALL_FIELDS = {
  version: "v",
  fromLayer: "from_layer",
  model: "model",
  route: "route",
  deadlineMs: "deadline_ms",
  requestId: "request_id",
} as const;

export type Metadata = Readonly<Record<string, string>>;

/** A value as it was written, and where, for the messages about it. */
export interface Said {
  readonly where: string;
  readonly text: string;
}

export interface CallFields {
  readonly fromLayer?: number;
  readonly model?: string;
  /** `local`: do not pass on. A list: the remaining hops. Undefined: pass on where this node has a next one. */
  readonly route?: "local" | readonly string[];
  readonly deadlineMs?: number;
  readonly requestId?: string;
}

/** Reads the side data of a call. Throws UserError `version_mismatch` or `malformed`. */
export function readCallFields(headers: Headers, metadata?: Metadata): CallFields {
  const said = (field: keyof typeof CALL_FIELDS) => agreed(headers, HEADERS[field], metadata, CALL_FIELDS[field]);
  checkVersion(said("version"));
  return {
    fromLayer: optional(said("fromLayer"), parseCount),
    model: said("model")?.text,
    route: optional(said("route"), parseRoute),
    deadlineMs: optional(said("deadlineMs"), parseCount),
    requestId: optional(said("requestId"), parseRequestId),
  };
}

export function readHeader(headers: Headers, name: string): Said | undefined {
  const text = headers.get(name);
  return text === null ? undefined : { where: `header ${name}`, text };
}

export function optional<T>(said: Said | undefined, parse: (said: Said) => T): T | undefined {
  return said === undefined ? undefined : parse(said);
}

/** A whole number from 0 that a float64 holds exactly. */
export function parseCount({ where, text }: Said): number {
  const value = /^\d{1,16}$/.test(text) ? Number(text) : NaN;
  if (Number.isSafeInteger(value)) return value;
  throw malformed(`${where} is ${quote(text)}`, "give a whole number from 0 to 2^53 - 1");
}

export function malformed(message: string, hint: string, options?: { cause?: unknown }): UserError {
  return new UserError("malformed", message, hint, options);
}

/** The metadata of a container rules; a header beside it may say the same or nothing. */
function agreed(headers: Headers, header: string, metadata: Metadata | undefined, key: string): Said | undefined {
  const outside = readHeader(headers, header);
  const inside =
    metadata && Object.hasOwn(metadata, key) ? { where: `metadata ${key}`, text: metadata[key]! } : undefined;
  if (outside && inside && outside.text !== inside.text) {
    throw malformed(
      `${outside.where} is ${quote(outside.text)}, and ${inside.where} of the container is ${quote(inside.text)}`,
      "leave the header away: the metadata of a container says it all",
    );
  }
  return inside ?? outside;
}

function checkVersion(said: Said | undefined): void {
  if (said === undefined || said.text === String(PROTOCOL_VERSION)) return;
  throw new UserError(
    "version_mismatch",
    `${said.where} is ${quote(said.text)}, and this node speaks version ${PROTOCOL_VERSION}`,
    "run the same version of meshnet on both sides",
  );
}

function parseRoute({ where, text }: Said): "local" | string[] {
  if (text === "local") return "local";
  const hint = 'say "local", or give a JSON list of the URLs of the remaining hops';
  let hops: unknown;
  try {
    hops = parseJson(text);
  } catch (cause) {
    throw malformed(`${where} is ${quote(text)}`, hint, { cause });
  }
  if (Array.isArray(hops) && hops.every((hop) => typeof hop === "string")) return hops;
  throw malformed(`${where} is ${quote(hops)}`, hint);
}

/** It goes into the logs of every node of the chain, so it may hold no spaces or line ends. */
function parseRequestId({ where, text }: Said): string {
  if (/^[\w.:-]{1,128}$/.test(text)) return text;
  throw malformed(`${where} is ${quote(text)}`, "give 1 to 128 letters, digits, or characters of _ . : -");
}
