import { createHash } from "node:crypto";

/** A Hub on loopback with the few endpoints that reading a model takes, and the ways in which a real one fails. */
export interface FakeHub extends Disposable {
  readonly url: string;
  /** `GET /org/name/resolve/…`, one line per request in order. */
  readonly requests: string[];
  /** What each request to the content server sent as authorization. */
  readonly contentTokens: (string | null)[];
  /** What of files was asked for, and how much of it was sent. */
  readonly served: Served[];
  /** Bytes of files that were sent in all, of those with this ending. */
  servedBytes(ending?: string): number;
  repositories: Record<string, FakeRepository>;
  behaviour: Behaviour;
}

export interface Served {
  file: string;
  begin: number;
  end: number;
  bytes: number;
}

export interface FakeRepository {
  commit?: string;
  /** Branches and tags besides main. */
  refs?: string[];
  /** A Blob stands for a file that is too large for memory; its hash is made up. */
  files: Record<string, string | Uint8Array | Blob>;
  /** Names of the files that git has only pointers to; by default those that end in .safetensors. */
  large?: string[];
  gated?: boolean;
}

export interface Behaviour {
  /** The token that opens gated repositories. */
  token?: string;
  /** Every token is a wrong one. */
  knowsNoToken?: boolean;
  /** Everything is answered with this page, as by a network that wants a login. */
  portal?: string;
  /** Each answer with content breaks off after so many bytes; one of a single byte, which only asks for the size, does not. */
  cutAfter?: number;
  /** The cut connection stays open instead, and nothing more comes. */
  stalls?: boolean;
  /** So many requests are answered with 502 first, or as said. */
  busy?: number;
  busyStatus?: number;
  busyHeaders?: Record<string, string>;
  /** Only requests for content are busy. */
  busyContent?: boolean;
  /** Of each connection. */
  bytesPerSecond?: number;
  /** After so many answers with content the file has another ETag. */
  changesAfter?: number;
  /** Headers by which the Hub itself says what it answers with, in place of the right ones. */
  linkHeaders?: Record<string, string>;
  /** Headers of answers with content, in place of the right ones. */
  contentHeaders?: Record<string, string>;
  /** An address that the Hub leads to is good for so many requests. */
  expiresAfter?: number;
  /** More than the range is sent. */
  surplus?: boolean;
  /** Ranges are answered with the whole file, as some proxies do. */
  ignoresRanges?: boolean;
  /** Content comes from another host, as the real Hub's does. */
  redirects?: boolean;
  /** Content differs from what is listed. */
  corrupt?: boolean;
}

export const COMMIT = "a".repeat(40);

export function fakeHub(repositories: Record<string, FakeRepository>, behaviour: Behaviour = {}): FakeHub {
  const requests: string[] = [];
  const contentTokens: (string | null)[] = [];
  const served: Served[] = [];
  const hub = { repositories, behaviour };
  let answers = 0;
  let addressUses = 0;

  const contentReply = (request: Request, repository: FakeRepository, file: string): Response => {
    const { behaviour } = hub;
    const content = blobOf(repository, file);
    const etag = answers++ >= (behaviour.changesAfter ?? Infinity) ? "changed" : "etag";
    const headers: Record<string, string> = { etag: `"${etag}"`, "accept-ranges": "bytes" };
    const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.get("range") ?? "");
    const isPart = range !== null && !behaviour.ignoresRanges;
    const begin = isPart ? Number(range[1]) : 0;
    const end = isPart && range[2] ? Math.min(Number(range[2]) + 1, content.size) : content.size;
    if (begin >= content.size && content.size > 0) return new Response(null, { status: 416 });
    if (isPart) headers["content-range"] = `bytes ${begin}-${end - 1}/${content.size}`;
    Object.assign(headers, behaviour.contentHeaders);
    const record = { file, begin, end, bytes: 0 };
    served.push(record);
    const body = content.slice(begin, behaviour.surplus ? end + 1000 : end);
    return new Response(sending(body, behaviour, record), {
      status: isPart ? 206 : 200,
      headers: { ...headers, "content-length": String(body.size) },
    });
  };

  const content = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    development: false, // or a connection that is cut on purpose is reported on stderr
    fetch(request) {
      contentTokens.push(request.headers.get("authorization"));
      const [, org, name, file = ""] = /^\/([^/]+)\/([^/]+)\/(.+)$/.exec(new URL(request.url).pathname) ?? [];
      if (addressUses++ >= (hub.behaviour.expiresAfter ?? Infinity)) {
        addressUses = 0;
        return new Response("<Error>expired</Error>", { status: 403 });
      }
      return contentReply(request, hub.repositories[`${org}/${name}`]!, decodeURIComponent(file));
    },
  });

  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    development: false, // or a connection that is cut on purpose is reported on stderr
    fetch(request) {
      const { pathname } = new URL(request.url);
      requests.push(`${request.method} ${pathname}`);
      if (hub.behaviour.portal) {
        return new Response(hub.behaviour.portal, { headers: { "content-type": "text/html" } });
      }
      const mayBeBusy = !hub.behaviour.busyContent || pathname.includes("/resolve/");
      if (mayBeBusy && (hub.behaviour.busy ?? 0) > 0) {
        hub.behaviour.busy!--;
        return new Response("busy", { status: hub.behaviour.busyStatus ?? 502, headers: hub.behaviour.busyHeaders });
      }
      return reply(request, pathname);
    },
  });

  function reply(request: Request, pathname: string): Response {
    const route =
      /^\/api\/models\/(?<id>[^/]+\/[^/]+)\/(?<op>revision|tree)\/(?<revision>[^/]+)$/.exec(pathname) ??
      /^\/(?<id>[^/]+\/[^/]+)\/(?<op>resolve)\/(?<revision>[^/]+)\/(?<file>.+)$/.exec(pathname);
    const { id = "", op, revision = "", file = "" } = route?.groups ?? {};
    const repository = hub.repositories[id];
    const authorization = request.headers.get("authorization");
    if (authorization && hub.behaviour.knowsNoToken) {
      const said = "Invalid credentials in Authorization header";
      return Response.json({ error: said }, { status: 401, headers: { "x-error-message": said } });
    }
    if (!repository) return refusal(authorization ? 404 : 401, "RepoNotFound", "Repository not found");
    const commit = repository.commit ?? COMMIT;
    if (!["main", commit, ...(repository.refs ?? [])].includes(decodeURIComponent(revision)))
      return refusal(404, "RevisionNotFound", `Invalid rev id: ${revision}`);
    if (op === "revision")
      return Response.json({ _id: "1", id, sha: commit, gated: repository.gated ? "manual" : false });
    if (op === "tree") return Response.json(Object.keys(repository.files).map((name) => entry(repository, name)));
    if (repository.gated && authorization !== `Bearer ${hub.behaviour.token}`) {
      return refusal(authorization ? 403 : 401, "GatedRepo", `Access to model ${id} is restricted`);
    }
    if (!(file in repository.files)) return refusal(404, "EntryNotFound", "Entry not found");
    const { lfs, size } = entry(repository, file);
    const linked: Record<string, string> = { "x-repo-commit": commit, "x-linked-size": String(size) };
    if (lfs) linked["x-linked-etag"] = `"${lfs.oid}"`;
    if (hub.behaviour.redirects) {
      const location = `${content.url.origin}/${id}/${file}`;
      return new Response(null, { status: 302, headers: { ...linked, location, ...hub.behaviour.linkHeaders } });
    }
    const answer = contentReply(request, repository, file);
    for (const [header, value] of Object.entries({ ...linked, ...hub.behaviour.linkHeaders })) {
      answer.headers.set(header, value);
    }
    return answer;
  }

  return Object.assign(hub, {
    url: server.url.origin,
    requests,
    contentTokens,
    served,
    servedBytes: (ending = "") =>
      served.filter(({ file }) => file.endsWith(ending)).reduce((total, { bytes }) => total + bytes, 0),
    [Symbol.dispose]() {
      void server.stop(true);
      void content.stop(true);
    },
  });
}

const CHUNK_MS = 20;

/** The body as the behaviour wants it sent; what was sent is counted. */
function sending(body: Blob, { cutAfter = Infinity, stalls, corrupt, bytesPerSecond }: Behaviour, record: Served) {
  const step = bytesPerSecond ? Math.ceil((bytesPerSecond * CHUNK_MS) / 1000) : 256 * 1024;
  let at = 0;
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        if (at >= body.size) return controller.close();
        if (at >= cutAfter && body.size > 1) {
          await Bun.sleep(stalls ? 600_000 : 10); // or the bytes before it would be lost with the connection
          return controller.error(new Error("cut"));
        }
        if (bytesPerSecond) await Bun.sleep(CHUNK_MS);
        const chunk = await body.slice(at, Math.min(at + step, cutAfter > 0 ? cutAfter : Infinity)).bytes();
        at += chunk.length;
        record.bytes += chunk.length;
        controller.enqueue(corrupt ? chunk.map((byte) => byte ^ 1) : chunk);
      },
    },
    { highWaterMark: 0 },
  );
}

interface Entry {
  type: "file";
  path: string;
  size: number;
  oid: string;
  lfs?: { oid: string; size: number; pointerSize: number };
}

function entry(repository: FakeRepository, name: string): Entry {
  const content = repository.files[name]!;
  const { size } = blobOf(repository, name);
  const isLarge = repository.large?.includes(name) ?? name.endsWith(".safetensors");
  const bytes = content instanceof Blob ? new TextEncoder().encode(`${name} ${size}`) : bytesOf(content);
  const listed = { type: "file" as const, path: name, size, oid: isLarge ? "f".repeat(40) : gitSha1(bytes) };
  return isLarge ? { ...listed, lfs: { oid: sha256(bytes), size, pointerSize: 134 } } : listed;
}

const bytesOf = (content: string | Uint8Array): Uint8Array =>
  typeof content === "string" ? new TextEncoder().encode(content) : content;

function blobOf({ files }: FakeRepository, name: string): Blob {
  const content = files[name] ?? "";
  return content instanceof Blob ? content : new Blob([new Uint8Array(bytesOf(content))]);
}

export const sha256 = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex");
export const gitSha1 = (bytes: Uint8Array): string =>
  createHash("sha1").update(`blob ${bytes.length}\0`).update(bytes).digest("hex");

const refusal = (status: number, code: string, message: string): Response =>
  Response.json({ error: message }, { status, headers: { "x-error-code": code, "x-error-message": message } });
