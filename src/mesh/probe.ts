import { messageOf, UserError } from "../base/errors.ts";
import { readBody } from "../protocol/body.ts";
import { parseErrorReply, RemoteError } from "../protocol/error-reply.ts";
import { HEADERS, PROTOCOL_VERSION } from "../protocol/headers.ts";
import { type NodeInfo, parseInfo } from "../protocol/info.ts";
import { MAX_PROBE_BYTES, parseProbeReply } from "../protocol/probe.ts";
import { DIRECT, networkProblem, plainUrl } from "./network.ts";

/** What a node is, and how fast it and the way to it are. */
export interface PeerReport {
  readonly url: string;
  readonly info: NodeInfo;
  /** Why it takes no calls now, in its own words; null where it is ready. */
  readonly notReady: string | null;
  /** From here to it and back, without work: the median of several small questions over one connection. */
  readonly roundTripSeconds: number;
  /** From here to it. Null where it could not be measured. */
  readonly uploadBytesPerSecond: number | null;
  /** What its layers take for one token by themselves, as it says itself. Null where it could not be measured. */
  readonly tokenSeconds: number | null;
  /** What could not be measured, and why. */
  readonly problems: readonly string[];
}

export interface ProbeOptions {
  /** Default: the global one. */
  readonly fetch?: (url: string, init: RequestInit) => Promise<Response>;
  readonly signal?: AbortSignal;
}

/** Small questions after the one that opens the connection. */
const ROUND_TRIPS = 9;
/** A payload that takes this long tells how fast the way is; a smaller one is followed by a larger one. */
const TELLING_SECONDS = 0.05;
const FIRST_PAYLOAD_BYTES = 64 << 10;
const PAYLOADS = 3;
/** Tokens after one that does not count; fewer where each takes long. */
const TOKENS = 3;
const LONG_SECONDS = 2;
/** For a small question. */
const ASK_TIMEOUT_MS = 5_000;
/** For a payload or a token. */
const WORK_TIMEOUT_MS = 60_000;
const MAX_REPLY_BYTES = 1 << 20;

/**
 * Asks a node what it is, and measures. Nothing is left behind on it.
 *
 * Throws UserError `bad_usage` for something that is no URL, `next_unreachable`, or `next_nonsense` where no meshnet node
 * answers; the RemoteError of a node that refuses to be asked. What goes wrong after that is in the report.
 */
export async function probePeer(url: string, options: ProbeOptions = {}): Promise<PeerReport> {
  const peer = new Peer(peerUrl(url), options);
  const info = await peer.info();
  const roundTripSeconds = await peer.roundTrip();
  const problems: string[] = [];
  const measured = async (what: string, measure: () => Promise<number>): Promise<number | null> => {
    try {
      return await measure();
    } catch (error) {
      if (!(error instanceof UserError || error instanceof RemoteError)) throw error;
      problems.push(`${what}: ${error.message}`);
      return null;
    }
  };
  const notReady = await peer.notReady();
  const uploadBytesPerSecond = await measured("throughput", () => peer.uploadSpeed(roundTripSeconds));
  const tokenSeconds = await measured("speed", () => peer.tokenTime(info));
  return { url: peer.url, info, notReady, roundTripSeconds, uploadBytesPerSecond, tokenSeconds, problems };
}

class Peer {
  readonly #options: ProbeOptions;

  constructor(
    readonly url: string,
    options: ProbeOptions,
  ) {
    this.#options = options;
  }

  async info(): Promise<NodeInfo> {
    const { text } = await this.#ask("info").catch((error: unknown) => {
      throw this.#isBesideNode(error) ? this.#besideNode() : error;
    });
    return this.#sense(() => parseInfo(text));
  }

  /** A meshnet node is there, and what stands behind host and port is no place of it: somebody has given the URL of its /info, say. */
  #isBesideNode(error: unknown): boolean {
    return error instanceof RemoteError && [404, 405].includes(error.status) && new URL(this.url).pathname !== "/";
  }

  #besideNode(): UserError {
    const { origin, pathname } = new URL(this.url);
    const problem = `${this.url} is not a node's URL: a node answers there, and has no ${pathname}`;
    return new UserError("bad_usage", problem, `give its host and port alone: ${origin}`);
  }

  async notReady(): Promise<string | null> {
    try {
      await this.#ask("health/ready");
      return null;
    } catch (error) {
      if (error instanceof RemoteError) return error.body.message;
      if (error instanceof UserError) return error.message;
      throw error;
    }
  }

  async roundTrip(): Promise<number> {
    const seconds: number[] = [];
    for (let i = 0; i <= ROUND_TRIPS; i++) seconds.push((await this.#ask("health/live")).seconds);
    return median(seconds.slice(1)); // the first one may have opened the connection
  }

  async uploadSpeed(roundTripSeconds: number): Promise<number> {
    const send = async (bytes: number): Promise<number> => {
      const body = payloadOf(bytes);
      const { text, seconds } = await this.#ask("probe", { method: "POST", body }, WORK_TIMEOUT_MS);
      this.#sense(() => parseProbeReply(text, bytes));
      return Math.max(seconds - roundTripSeconds, 1e-6);
    };
    let bytes = FIRST_PAYLOAD_BYTES;
    let first = await send(bytes);
    while (first < TELLING_SECONDS && bytes < MAX_PROBE_BYTES) first = await send((bytes *= 4));
    const seconds = [first];
    while (seconds.length < PAYLOADS) seconds.push(await send(bytes));
    return bytes / median(seconds);
  }

  /** Once through the layers of this node alone, measured by itself: the way there does not count. */
  async tokenTime({ v, start, hidden_size: hiddenSize }: NodeInfo): Promise<number> {
    if (v !== PROTOCOL_VERSION) throw this.#nonsense(`it speaks protocol version ${v}, not ${PROTOCOL_VERSION}`);
    const headers: Record<string, string> =
      start === 0
        ? { "Content-Type": "application/json" }
        : { "Content-Type": "application/octet-stream", [HEADERS.shape]: `1,1,${hiddenSize}` };
    const body = start === 0 ? '{"input_ids":[[0]]}' : new Uint8Array(hiddenSize * 2);
    const init = { method: "POST", headers: { ...headers, [HEADERS.route]: "local" }, body };
    const seconds: number[] = [];
    do {
      const { headers } = await this.#ask("forward", init, WORK_TIMEOUT_MS);
      const [, ms] = /(?:^|[\s,])stage;dur=([\d.]+)/.exec(headers.get("Server-Timing") ?? "") ?? [];
      if (ms === undefined) throw this.#nonsense("it does not say how long its layers took (Server-Timing)");
      seconds.push(Number(ms) / 1000);
    } while (seconds.length <= TOKENS && seconds[0]! < LONG_SECONDS);
    return median(seconds.length > 1 ? seconds.slice(1) : seconds);
  }

  async #ask(path: string, init: RequestInit = {}, timeoutMs = ASK_TIMEOUT_MS) {
    const { fetch = globalThis.fetch, signal } = this.#options;
    const limit = AbortSignal.timeout(timeoutMs);
    const both = signal ? AbortSignal.any([signal, limit]) : limit;
    const began = performance.now();
    let reply: Response;
    let bytes: Uint8Array;
    try {
      reply = await fetch(new URL(path, this.url).href, { ...init, ...DIRECT, signal: both });
      bytes = await readBody(reply, MAX_REPLY_BYTES, "its reply");
    } catch (cause) {
      if (signal?.aborted) throw cause;
      if (cause instanceof UserError) throw this.#nonsense(cause.message, cause);
      throw this.#unreachable(limit.aborted ? `no answer within ${timeoutMs / 1000} s` : networkProblem(cause), cause);
    }
    const seconds = (performance.now() - began) / 1000;
    const text = new TextDecoder().decode(bytes);
    if (reply.ok) return { text, seconds, headers: reply.headers };
    throw (
      parseErrorReply(reply.status, reply.headers, text) ??
      this.#nonsense(`${path} gives ${reply.status} without a meshnet error`)
    );
  }

  #sense<T>(read: () => T): T {
    try {
      return read();
    } catch (cause) {
      if (cause instanceof UserError) throw this.#nonsense(messageOf(cause), cause);
      throw cause;
    }
  }

  #unreachable(problem: string, cause: unknown): UserError {
    return new UserError(
      "next_unreachable",
      `the node ${this.url} cannot be reached: ${problem}`,
      "start it (meshnet node --host with an address that this machine reaches), or look at the firewall between them",
      { cause },
    );
  }

  #nonsense(problem: string, cause?: unknown): UserError {
    const { origin, pathname } = new URL(this.url);
    const alone = pathname === "/" ? "" : ` A node behind no proxy has no path: ${origin}`;
    const hint = `is this the URL of a meshnet node of this version?${alone}`;
    return new UserError("next_nonsense", `the node ${this.url} answered nonsense: ${problem}`, hint, { cause });
  }
}

/** The URL of a node, as it is asked. Throws UserError `bad_usage` for what is none. */
export function peerUrl(text: string): string {
  const url = plainUrl(text);
  if (url !== undefined) return url;
  const what = URL.parse(text)?.password ? "the URL of a node has a password in it" : `"${text}" is not a node's URL`;
  throw new UserError("bad_usage", what, "give host and port, as in http://192.168.1.20:8002");
}

/** Nothing that a proxy on the way could compress. */
function payloadOf(bytes: number): Uint8Array<ArrayBuffer> {
  const block = crypto.getRandomValues(new Uint8Array(Math.min(bytes, FIRST_PAYLOAD_BYTES)));
  const payload = new Uint8Array(bytes);
  for (let at = 0; at < bytes; at += block.length) payload.set(block.subarray(0, bytes - at), at);
  return payload;
}

function median(values: readonly number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)]! + sorted[Math.ceil((sorted.length - 1) / 2)]!) / 2;
}
