import { UserError } from "../base/errors.ts";
import { hashOf, type HubClient, type ListedFile, MOST_REDIRECTS, redirectOf } from "./client.ts";
import { type ByteRange } from "./ranges.ts";
import { nonsense } from "./refusal.ts";
import { networkMessage, Transient } from "./retry.ts";

/** Where a file is on the Hub, and by which names its content was known so far. */
export interface HubFile {
  readonly modelId: string;
  readonly commit: string;
  readonly file: ListedFile;
  /** Where the ETags of answers are kept, by host, as long as what was fetched. */
  readonly memory: { etags: ReadonlyMap<string, string> };
}

/** A file on the Hub is another than it was when it was listed, or when its first part was fetched. */
export class ContentChanged extends UserError {
  readonly file: ListedFile;

  constructor({ file, modelId }: HubFile, was: string, is: string) {
    super(
      "download",
      `${file.name} of ${modelId} changed while it was fetched: it was ${was}, and is ${is}`,
      "what was fetched of it is dropped: run it again; if it stays, use --whole-files, or look at the mirror in HF_ENDPOINT",
    );
    this.file = file;
  }
}

/**
 * The content of one file on the Hub, by ranges. An answer is taken only if it is exactly what was asked for, of the
 * file that was listed; where the Hub leads to is kept for the next range, as it counts how often it is asked.
 */
export class HubContent {
  readonly #client: HubClient;
  readonly #of: HubFile;
  #location: URL | undefined;

  constructor(client: HubClient, of: HubFile) {
    this.#client = client;
    this.#of = of;
  }

  /**
   * The bytes of a range of the file, or of all of it, in pieces; all of them, or it throws: Transient for what may go
   * well another time, UserError `download` for what will not.
   */
  async *read(range: ByteRange | "whole", signal?: AbortSignal): AsyncGenerator<Uint8Array> {
    const headers: Record<string, string> = range === "whole" ? {} : { range: `bytes=${range.begin}-${range.end - 1}` };
    const response = await this.#open(new Headers(headers), signal);
    try {
      if (range === "whole") this.#checkWhole(response);
      else this.#checkPart(response, range);
    } catch (error) {
      discard(response);
      throw error;
    }
    const expected = range === "whole" ? this.#of.file.size : range.end - range.begin;
    yield* exactly(expected, response.body, this.#client.silenceMs, signal);
  }

  /** Asks where the last answer came from, else the Hub, and follows where it leads. */
  async #open(headers: Headers, signal: AbortSignal | undefined): Promise<Response> {
    const { modelId, commit, file } = this.#of;
    const known = this.#location;
    let url = known ?? this.#client.contentUrl(modelId, commit, file.name);
    for (let hops = 0; ; hops++) {
      const response = await this.#client.request(url, headers, signal).catch((error) => {
        this.#forget(known);
        throw error;
      });
      if (this.#client.isHub(url)) this.#checkListing(response);
      const next = redirectOf(response, url);
      if (next && hops < MOST_REDIRECTS) {
        discard(response);
        url = next;
      } else if (response.ok) {
        this.#location = url;
        return response;
      } else {
        this.#forget(known);
        throw await this.#failure(response, url);
      }
    }
  }

  /** An address that failed is not asked twice: most are good for an hour only. */
  #forget(location: URL | undefined): void {
    if (this.#location === location) this.#location = undefined;
  }

  async #failure(response: Response, url: URL): Promise<Error> {
    const { file, modelId } = this.#of;
    if (response.status === 416) {
      discard(response);
      return new ContentChanged(this.#of, `${file.size} bytes long`, "shorter");
    }
    if (this.#client.isHub(url)) return await this.#client.refusal(modelId, response, file.name);
    discard(response);
    return new Transient(`${url.origin} answers HTTP ${response.status}`);
  }

  /** The Hub says of each answer of its own what it is of. */
  #checkListing({ headers }: Response): void {
    const { file, commit } = this.#of;
    const linked = plainEtag(headers.get("x-linked-etag"));
    if (linked && ![file.sha256, file.xetHash, file.gitSha1].includes(linked)) {
      throw new ContentChanged(this.#of, hashOf(file), linked);
    }
    const size = headers.get("x-linked-size");
    if (size && Number(size) !== file.size) {
      throw new ContentChanged(this.#of, `${file.size} bytes long`, `${size} bytes long`);
    }
    const from = headers.get("x-repo-commit");
    if (from && from !== commit) throw new ContentChanged(this.#of, `at commit ${commit}`, `at commit ${from}`);
  }

  #checkWhole(response: Response): void {
    this.#checkPlain(response);
    this.#checkEtag(response);
    const length = response.headers.get("content-length");
    if (length && Number(length) !== this.#of.file.size) {
      throw new ContentChanged(this.#of, `${this.#of.file.size} bytes long`, `${length} bytes long`);
    }
  }

  #checkPart(response: Response, { begin, end }: ByteRange): void {
    const { file, modelId } = this.#of;
    this.#checkPlain(response);
    this.#checkEtag(response);
    if (response.status !== 206) {
      throw new UserError(
        "download",
        `the server ignores Range: it sent all of ${file.name} of ${modelId} (HTTP ${response.status}) for bytes ${begin}-${end}`,
        "use --whole-files, or another HF_ENDPOINT or proxy",
        { details: { ignoresRange: true } },
      );
    }
    const given = response.headers.get("content-range") || "no Content-Range";
    const [, from, to, total] = (/^bytes (\d+)-(\d+)\/(\d+)$/.exec(given) ?? []).map(Number);
    if (from === begin && to === end - 1 && total === file.size) return;
    if (total !== undefined && total !== file.size) {
      throw new ContentChanged(this.#of, `${file.size} bytes long`, `${total} bytes long`);
    }
    const asked = `bytes ${begin}-${end - 1}/${file.size}`;
    throw nonsense(hostOf(response), `${JSON.stringify(given)} of ${file.name}, where "${asked}" was asked for`);
  }

  #checkPlain(response: Response): void {
    const encoding = response.headers.get("content-encoding");
    if (!encoding || encoding === "identity") return;
    throw nonsense(hostOf(response), `${this.#of.file.name} as ${encoding}, which was not asked for`);
  }

  /** Hosts call the same content by different names, but each of them always by the same. */
  #checkEtag(response: Response): void {
    const etag = plainEtag(response.headers.get("etag"));
    if (!etag) return;
    const host = hostOf(response);
    const { memory } = this.#of;
    const first = memory.etags.get(host);
    if (first === undefined) memory.etags = new Map([...memory.etags, [host, etag]]);
    else if (first !== etag) throw new ContentChanged(this.#of, `${first} on ${host}`, etag);
  }
}

/** Nothing more is wanted of it, whatever it says to that. */
const discard = ({ body }: Response): void => void body?.cancel().catch(() => {});

const plainEtag = (etag: string | null): string | undefined => etag?.replace(/^W\//, "").replaceAll('"', "");
const hostOf = ({ url }: Response): string => URL.parse(url)?.host ?? "the Hub";

/** The pieces of a body that must have exactly so many bytes. One that falls silent is an error. */
async function* exactly(
  expected: number,
  body: ReadableStream<Uint8Array> | null,
  silenceMs: number,
  signal: AbortSignal | undefined,
): AsyncGenerator<Uint8Array> {
  let count = 0;
  for await (const piece of piecesOf(body, silenceMs, signal)) {
    count += piece.length;
    if (count > expected) throw new Transient(`more than the ${expected} bytes came that were asked for`);
    yield piece;
  }
  if (count < expected) throw new Transient(`the connection ended after ${count} of ${expected} bytes`);
}

async function* piecesOf(
  body: ReadableStream<Uint8Array> | null,
  silenceMs: number,
  signal: AbortSignal | undefined,
): AsyncGenerator<Uint8Array> {
  if (!body) return;
  const reader = body.getReader();
  let timer: Timer | undefined;
  const silence = () =>
    new Promise<never>((_, reject) => {
      timer = setTimeout(() => reject(new Error(`nothing came for ${silenceMs / 1000} s`)), silenceMs);
    });
  try {
    for (;;) {
      const { done, value } = await Promise.race([reader.read(), silence()]).finally(() => clearTimeout(timer));
      signal?.throwIfAborted();
      if (done) return;
      yield value;
    }
  } catch (cause) {
    signal?.throwIfAborted();
    throw new Transient(networkMessage(cause), { cause });
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => {}); // whatever it says: nothing more is wanted of it
  }
}
