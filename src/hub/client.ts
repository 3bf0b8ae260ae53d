import { downloadFile, listFiles, modelInfo } from "@huggingface/hub";
import { messageOf, UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";

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

export interface HubClientOptions {
  readonly endpoint: string;
  readonly token: string | undefined;
  readonly log: Logger;
  readonly fetch?: typeof fetch;
  /** Before the first repetition of a failed request; doubled for each further one. */
  readonly retryPauseMs?: number;
  /** For the Hub to begin its answer, and between two pieces of a file: a silent connection is a broken one. */
  readonly silenceMs?: number;
}

/** How often a request is tried in all, while the Hub is busy or the network fails. */
const ATTEMPTS = 5;

/**
 * The Hub over @huggingface/hub, which is given what it ignores (HF_ENDPOINT, the token, retries, deadlines) through
 * the fetch it calls. All that can go wrong there is a UserError `download` that says what to do.
 */
export class HubClient {
  readonly #options: HubClientOptions;
  readonly #origin: string;
  readonly silenceMs: number;

  constructor(options: HubClientOptions) {
    this.#options = options;
    this.silenceMs = options.silenceMs ?? 30_000;
    this.#origin = originOf(options.endpoint);
  }

  /** The commit that a branch, tag or commit names now. */
  async resolveCommit(modelId: string, revision: string): Promise<string> {
    const { sha } = await modelInfo({ ...this.#common(modelId), name: modelId, revision, additionalFields: ["sha"] });
    if (/^[0-9a-f]{40}$/.test(sha ?? "")) return sha!;
    throw nonsense(this.#options.endpoint, `${JSON.stringify(sha)} as the commit of ${modelId}@${revision}`);
  }

  /** All files of a commit, in folders too. */
  async list(modelId: string, commit: string): Promise<ListedFile[]> {
    const files: ListedFile[] = [];
    const listing = listFiles({ ...this.#common(modelId), repo: model(modelId), revision: commit, recursive: true });
    for await (const { type, path, size, oid, lfs, xetHash } of listing) {
      if (type !== "file") continue;
      if (typeof oid !== "string") throw nonsense(this.#options.endpoint, `no object id for ${path} of ${modelId}`);
      files.push({ name: path, size: lfs?.size ?? size, gitSha1: oid, sha256: lfs?.oid, xetHash });
    }
    return files;
  }

  /** The file's bytes from `from` on; asked anew where the last answer broke off. */
  async open(modelId: string, commit: string, name: string): Promise<(from: number) => ReadableStream<Uint8Array>> {
    const blob = await downloadFile({
      ...this.#common(modelId),
      repo: model(modelId),
      path: name,
      revision: commit,
      xet: false, // a second protocol; every file can be had without it
    });
    if (!blob) throw nonsense(this.#options.endpoint, `no file ${name}, which it lists for ${modelId}@${commit}`);
    return (from) => blob.slice(from).stream() as ReadableStream<Uint8Array>;
  }

  /** The library only ever asks for things: what it sends is an address and headers. */
  #common(modelId: string) {
    const send = (url: string | URL, init?: RequestInit) =>
      this.#send(modelId, new URL(url), new Headers(init?.headers));
    return { hubUrl: this.#options.endpoint, fetch: send as typeof fetch };
  }

  async #send(modelId: string, url: URL, headers: Headers): Promise<Response> {
    // Here and not through the library, which takes no token but those of one Hub; and to no other host.
    if (this.#options.token && url.origin === this.#origin) {
      headers.set("authorization", `Bearer ${this.#options.token}`);
    }
    headers.set("accept-encoding", "identity"); // or a range would be one of the compressed bytes
    for (let attempt = 1; ; attempt++) {
      const last = attempt === ATTEMPTS;
      try {
        const response = await this.#fetchOnce(url, headers);
        if (!isBusy(response) || last) return await this.#accepted(modelId, headers, response);
        await response.body?.cancel();
      } catch (error) {
        if (error instanceof UserError) throw error;
        if (last) throw unreachable(this.#options.endpoint, error);
      }
      await this.pause(attempt);
    }
  }

  /** Half a second at first, and twice as long after each further failure. */
  pause(attempt: number): Promise<void> {
    const pauseMs = (this.#options.retryPauseMs ?? 500) * 2 ** (attempt - 1);
    this.#options.log.debug("hub retry", { attempt, pauseMs });
    return Bun.sleep(pauseMs);
  }

  async #fetchOnce(url: URL, headers: Headers): Promise<Response> {
    const silence = new AbortController();
    const giveUp = () => silence.abort(new Error(`no answer within ${this.silenceMs / 1000} s`));
    const timer = setTimeout(giveUp, this.silenceMs);
    try {
      return await (this.#options.fetch ?? fetch)(url, { headers, signal: silence.signal });
    } finally {
      clearTimeout(timer);
    }
  }

  async #accepted(modelId: string, headers: Headers, response: Response): Promise<Response> {
    if (response.status === 200 && headers.has("range")) {
      throw nonsense(this.#options.endpoint, `a whole file where a part of it was asked for`);
    }
    const code = response.headers.get("x-error-code");
    if (response.ok || code === "EntryNotFound") return response;
    const said = response.headers.get("x-error-message") ?? messageIn(await response.text());
    throw refused({ modelId, status: response.status, code, said, withToken: this.#options.token !== undefined });
  }
}

/** Never a plain string, which the library would read as another kind of repository if it began with "datasets/". */
const model = (name: string) => ({ type: "model" as const, name });

const isBusy = ({ status }: Response): boolean => status === 429 || status >= 500;

interface Refusal {
  modelId: string;
  status: number;
  code: string | null;
  said: string;
  withToken: boolean;
}

function refused({ modelId, status, code, said, withToken }: Refusal): UserError {
  const heard = `(HTTP ${status}${said ? `: ${said}` : ""})`;
  if (code === "GatedRepo") {
    return new UserError(
      "download",
      `${modelId} is open only to people who have accepted its terms ${heard}`,
      withToken
        ? "accept the terms on the model's page with the account that HF_TOKEN belongs to"
        : "accept the terms on the model's page and set HF_TOKEN to a token of that account",
    );
  }
  if (code === "RevisionNotFound") {
    return new UserError(
      "download",
      `${modelId} has no such revision ${heard}`,
      "give a branch, a tag or a commit of it",
    );
  }
  if (status === 401 || status === 403 || status === 404) {
    return new UserError(
      "download",
      `the Hub has no model ${modelId}, or none that ${withToken ? "this token" : "anybody without a token"} may see ${heard}`,
      withToken
        ? "check the spelling (org/name), and that HF_TOKEN is valid and may read it"
        : "check the spelling (org/name); for a private model set HF_TOKEN",
    );
  }
  if (status === 429) {
    return new UserError(
      "download",
      `the Hub refuses more requests for now ${heard}`,
      "wait some minutes, or set HF_TOKEN",
    );
  }
  return new UserError("download", `the Hub cannot serve ${modelId} ${heard}`, "try again later");
}

/** Its details tell a network that is down from a Hub that says no: only then is an old answer good enough. */
const unreachable = (endpoint: string, cause: unknown): UserError =>
  new UserError(
    "download",
    `the Hub at ${endpoint} cannot be reached: ${messageOf(cause)}`,
    "check the network and HF_ENDPOINT; with --offline only the cache is used",
    { cause, details: { unreachable: true } },
  );

const nonsense = (endpoint: string, what: string): UserError =>
  new UserError("download", `the Hub at ${endpoint} gave ${what}`, "check HF_ENDPOINT, and any proxy in between");

function messageIn(body: string): string {
  try {
    const { error } = JSON.parse(body);
    return typeof error === "string" ? error : "";
  } catch {
    return "";
  }
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
