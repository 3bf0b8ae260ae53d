import { listFiles, modelInfo } from "@huggingface/hub";
import { setTimeout as pause } from "node:timers/promises";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { nonsense, refused } from "./refusal.ts";
import { askedPauseMs, backoffMs, isBusy, LONGEST_PAUSE_MS, networkMessage, Transient } from "./retry.ts";

/** One file as the Hub lists it. */
export interface ListedFile {
  readonly name: string;
  readonly size: number;
  /** Of the content as git keeps it: for a large file, of a short text that points to it. */
  readonly gitSha1: string;
  /** Of the content of a large file. */
  readonly sha256?: string;
  readonly xetHash?: string;
}

/** The name of a file's content in every cache: what the Hub gives as its ETag. */
export const hashOf = ({ sha256, xetHash, gitSha1 }: ListedFile): string => sha256 ?? xetHash ?? gitSha1;

export interface HubClientOptions {
  readonly endpoint: string;
  readonly token: string | undefined;
  readonly log: Logger;
  readonly fetch?: typeof fetch;
  /** Before the first repetition of a failed request; doubled for each further one. */
  readonly retryPauseMs?: number;
  /** For the Hub to begin its answer. */
  readonly answerMs?: number;
  /** Between two pieces of a file: a silent connection is a broken one. */
  readonly silenceMs?: number;
}

/** How often something is tried in all without getting any further. */
const ATTEMPTS = 5;
const SILENCE_MS = 30_000;
const HASH = /^[0-9a-f]{40}([0-9a-f]{24})?$/;

/**
 * The Hub. Its listings come over @huggingface/hub, which is given what it ignores (HF_ENDPOINT, the token, retries,
 * deadlines) through the fetch it calls; content comes over `HubContent`. All that can go wrong is a UserError
 * `download` that says what to do. Proxies (HTTP_PROXY, HTTPS_PROXY, NO_PROXY) are the business of Bun's fetch.
 */
export class HubClient {
  readonly #options: HubClientOptions;
  readonly #origin: string;
  readonly silenceMs: number;

  constructor(options: HubClientOptions) {
    this.#options = options;
    this.silenceMs = options.silenceMs ?? SILENCE_MS;
    this.#origin = originOf(options.endpoint);
  }

  /** The commit that a branch, tag or commit names now. */
  async resolveCommit(modelId: string, revision: string): Promise<string> {
    const { sha } = await this.#understood(
      modelInfo({ ...this.#common(modelId), name: modelId, revision, additionalFields: ["sha"] }),
    );
    if (/^[0-9a-f]{40}$/.test(sha ?? "")) return sha!;
    throw nonsense(this.#origin, `${JSON.stringify(sha)} as the commit of ${modelId}@${revision}`);
  }

  /** All files of a commit, in folders too. */
  async list(modelId: string, commit: string): Promise<ListedFile[]> {
    const files: ListedFile[] = [];
    const listing = listFiles({ ...this.#common(modelId), repo: model(modelId), revision: commit, recursive: true });
    for (const { type, path, size, oid, lfs, xetHash } of await this.#understood(Array.fromAsync(listing))) {
      if (type !== "file") continue;
      const file = { name: path, size: lfs?.size ?? size, gitSha1: oid ?? "", sha256: lfs?.oid, xetHash };
      // It becomes the name of a file on this disk, and its size the length of one.
      if (!HASH.test(hashOf(file))) throw nonsense(this.#origin, `no hash of ${path} of ${modelId}`);
      if (!Number.isSafeInteger(file.size) || file.size < 0) throw nonsense(this.#origin, `no size of ${path}`);
      files.push(file);
    }
    return files;
  }

  /** Where the Hub has a file; from there it may lead on to another host. */
  contentUrl(modelId: string, commit: string, name: string): URL {
    const path = name.split("/").map(encodeURIComponent).join("/");
    return new URL(`${this.#options.endpoint}/${modelId}/resolve/${commit}/${path}`);
  }

  isHub(url: URL): boolean {
    return url.origin === this.#origin;
  }

  /** What this answer of the Hub's, which is none of those that were hoped for, means to a user. */
  async refusal(modelId: string, response: Response, file?: string): Promise<UserError> {
    return await refused({ modelId, file, response, withToken: this.#options.token !== undefined });
  }

  /** One request, redirects not followed. Throws Transient for what may go well another time. */
  async request(url: URL, headers: Headers, signal?: AbortSignal): Promise<Response> {
    // To no other host than the Hub's own; and not through the library, which takes only tokens of one form.
    if (this.#options.token && this.isHub(url)) headers.set("authorization", `Bearer ${this.#options.token}`);
    else headers.delete("authorization");
    headers.set("accept-encoding", "identity"); // or a range would be one of the compressed bytes
    const response = await this.#answer(url, headers, signal);
    if (!isBusy(response)) return response;
    const said = (await response.text().catch(() => "")).trim().slice(0, 200);
    const message = `${url.origin} answers HTTP ${response.status}${said ? `: ${said}` : ""}`;
    const hint = response.status === 429 ? "wait some minutes, or set HF_TOKEN" : "try again later";
    throw new Transient(message, { hint, pauseMs: askedPauseMs(response.headers, Date.now()) });
  }

  /** Tries until it goes well, as long as the failures are Transient and there is progress in between. */
  async persist<T>(tryOnce: () => Promise<T>, { what, hasProgressed, signal }: Persistence = {}): Promise<T> {
    for (let fruitless = 1; ; fruitless++) {
      try {
        return await tryOnce();
      } catch (error) {
        if (!(error instanceof Transient)) throw error;
        if (hasProgressed?.()) fruitless = 1;
        const pauseMs = error.pauseMs ?? backoffMs(fruitless, this.#options.retryPauseMs ?? 500);
        if (fruitless === ATTEMPTS || pauseMs > LONGEST_PAUSE_MS) throw gaveUp(error, pauseMs, what);
        const fields = { what, error: error.message, retryInSeconds: (pauseMs / 1000).toFixed(1) };
        this.#options.log.warn("download interrupted", fields);
        await pause(pauseMs, { signal });
      }
    }
  }

  async #answer(url: URL, headers: Headers, signal?: AbortSignal): Promise<Response> {
    const answerMs = this.#options.answerMs ?? this.silenceMs;
    const deadline = new AbortController();
    const timer = setTimeout(() => deadline.abort(new Error(`no answer within ${answerMs / 1000} s`)), answerMs);
    const signals = signal ? AbortSignal.any([signal, deadline.signal]) : deadline.signal;
    try {
      return await (this.#options.fetch ?? fetch)(url, { headers, redirect: "manual", signal: signals });
    } catch (cause) {
      signal?.throwIfAborted();
      const hint = "check the network and HF_ENDPOINT; with --offline only the cache is used";
      const whose = this.isHub(url) ? `the Hub at ${this.#options.endpoint}` : url.origin;
      const message = `${whose} cannot be reached: ${networkMessage(cause)}`;
      throw new Transient(message, { hint, isUnreachable: true, cause });
    } finally {
      clearTimeout(timer);
    }
  }

  /** The library only ever asks for things: what it sends is an address and headers. */
  #common(modelId: string) {
    const send = async (url: string | URL, init?: RequestInit) => {
      const headers = new Headers(init?.headers);
      const response = await this.persist(async () => await whole(await this.#follow(new URL(url), headers)));
      if (response.ok) return response;
      throw await this.refusal(modelId, response);
    };
    return { hubUrl: this.#options.endpoint, fetch: send as typeof fetch };
  }

  /** What the library cannot read did not come from a Hub. */
  async #understood<T>(answer: Promise<T>): Promise<T> {
    try {
      return await answer;
    } catch (error) {
      throw error instanceof UserError ? error : nonsense(this.#origin, `an answer that is none: ${messageOf(error)}`);
    }
  }

  /** A model that was renamed is found under its old name. */
  async #follow(url: URL, headers: Headers): Promise<Response> {
    for (let hops = 0; ; hops++) {
      const response = await this.request(url, headers);
      const next = redirectOf(response, url);
      if (!next || hops === MOST_REDIRECTS) return response;
      await response.body?.cancel();
      url = next;
    }
  }
}

export interface Persistence {
  /** For the error: the file whose content it is. */
  readonly what?: string;
  /** Whether anything came since it was asked last. */
  readonly hasProgressed?: () => boolean;
  /** Ends the waiting between two tries. */
  readonly signal?: AbortSignal;
}

/** With its body here, which the library would read where nothing is tried again. */
async function whole(response: Response): Promise<Response> {
  try {
    return new Response(await response.arrayBuffer(), response);
  } catch (cause) {
    throw new Transient(`the connection to the Hub broke off: ${networkMessage(cause)}`, {
      isUnreachable: true,
      cause,
    });
  }
}

export const MOST_REDIRECTS = 5;

/** Where an answer leads on to. */
export function redirectOf({ status, headers }: Response, url: URL): URL | undefined {
  const location = headers.get("location");
  const next = status >= 300 && status < 400 && location ? URL.parse(location, url.href) : null;
  return next && /^https?:$/.test(next.protocol) ? next : undefined;
}

/** Never a plain string, which the library would read as another kind of repository if it began with "datasets/". */
const model = (name: string) => ({ type: "model" as const, name });

/** Its details tell a network that is down from a Hub that says no: only then is an old answer good enough. */
function gaveUp({ message, hint, cause, isUnreachable }: Transient, pauseMs: number, what?: string): UserError {
  const problem = what ? `${what} broke off: ${message}` : message;
  const way = what && isUnreachable ? "check the network and run it again; what has arrived is kept" : hint;
  const tooLong = pauseMs > LONGEST_PAUSE_MS ? `, and asks to wait ${Math.round(pauseMs / 60_000)} minutes` : "";
  return new UserError("download", problem + tooLong, way, { cause, details: { unreachable: isUnreachable } });
}

function originOf(endpoint: string): string {
  try {
    return new URL(endpoint).origin;
  } catch (cause) {
    const hint = "set HF_ENDPOINT to the http(s) address of a Hub, or unset it";
    throw new UserError("bad_usage", `HF_ENDPOINT is ${JSON.stringify(endpoint)}, which is no address`, hint, {
      cause,
    });
  }
}
