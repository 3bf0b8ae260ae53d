import { createHash } from "node:crypto";

/** A Hub on loopback with the few endpoints that reading a model takes, and the ways in which a real one fails. */
export interface FakeHub extends Disposable {
  readonly url: string;
  /** `GET /org/name/resolve/…`, one line per request in order. */
  readonly requests: string[];
  /** What each request to the content server sent as authorization. */
  readonly contentTokens: (string | null)[];
  repositories: Record<string, FakeRepository>;
  behaviour: Behaviour;
}

export interface FakeRepository {
  commit?: string;
  files: Record<string, string | Uint8Array>;
  /** Names of the files that git has only pointers to; by default those that end in .safetensors. */
  large?: string[];
  gated?: boolean;
}

export interface Behaviour {
  /** The token that opens gated repositories. */
  token?: string;
  /** Each answer with content breaks off after so many bytes; one of a single byte, which only asks for the size, does not. */
  cutAfter?: number;
  /** The cut connection stays open instead, and nothing more comes. */
  stalls?: boolean;
  /** So many requests are answered with 502 first. */
  busy?: number;
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
  const hub = { repositories, behaviour };

  const content = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    development: false, // or a connection that is cut on purpose is reported on stderr
    fetch(request) {
      contentTokens.push(request.headers.get("authorization"));
      const [, org, name, file = ""] = /^\/([^/]+)\/([^/]+)\/(.+)$/.exec(new URL(request.url).pathname) ?? [];
      return contentReply(request, bytesIn(hub.repositories[`${org}/${name}`]!, file), hub.behaviour);
    },
  });

  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    development: false, // or a connection that is cut on purpose is reported on stderr
    fetch(request) {
      const { pathname } = new URL(request.url);
      requests.push(`${request.method} ${pathname}`);
      if ((hub.behaviour.busy ?? 0) > 0) {
        hub.behaviour.busy!--;
        return new Response("bad gateway", { status: 502 });
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
    if (!repository) return refusal(authorization ? 404 : 401, "RepoNotFound", "Repository not found");
    const commit = repository.commit ?? COMMIT;
    if (revision !== "main" && revision !== commit)
      return refusal(404, "RevisionNotFound", `Invalid rev id: ${revision}`);
    if (op === "revision")
      return Response.json({ _id: "1", id, sha: commit, gated: repository.gated ? "manual" : false });
    if (op === "tree") return Response.json(Object.keys(repository.files).map((name) => entry(repository, name)));
    if (repository.gated && authorization !== `Bearer ${hub.behaviour.token}`) {
      return refusal(authorization ? 403 : 401, "GatedRepo", `Access to model ${id} is restricted`);
    }
    if (!(file in repository.files)) return refusal(404, "EntryNotFound", "Entry not found");
    if (hub.behaviour.redirects) {
      return new Response(null, { status: 302, headers: { location: `${content.url.origin}/${id}/${file}` } });
    }
    return contentReply(request, bytesIn(repository, file), hub.behaviour);
  }

  return Object.assign(hub, {
    url: server.url.origin,
    requests,
    contentTokens,
    [Symbol.dispose]() {
      void server.stop(true);
      void content.stop(true);
    },
  });
}

function contentReply(request: Request, whole: Uint8Array, behaviour: Behaviour): Response {
  const sent = behaviour.corrupt ? whole.map((byte) => byte ^ 1) : whole;
  const headers: Record<string, string> = { etag: '"etag"', "accept-ranges": "bytes" };
  const range = /^bytes=(\d+)-(\d*)$/.exec(request.headers.get("range") ?? "");
  if (!range || behaviour.ignoresRanges) return cut(sent, 200, headers, behaviour);
  const [start, end] = [Number(range[1]), range[2] ? Number(range[2]) + 1 : sent.length];
  if (start >= sent.length) return new Response(null, { status: 416 });
  headers["content-range"] = `bytes ${start}-${Math.min(end, sent.length) - 1}/${sent.length}`;
  return cut(sent.subarray(start, end), 206, headers, behaviour);
}

function cut(
  body: Uint8Array,
  status: number,
  headers: Record<string, string>,
  { cutAfter, stalls }: Behaviour,
): Response {
  if (cutAfter === undefined || body.length <= Math.max(cutAfter, 1))
    return new Response(new Uint8Array(body), { status, headers });
  const stream = new ReadableStream({
    async start(controller) {
      controller.enqueue(body.slice(0, cutAfter));
      await Bun.sleep(10); // or the bytes before it would be lost with the connection
      if (!stalls) controller.error(new Error("cut"));
    },
  });
  return new Response(stream, { status, headers: { ...headers, "content-length": String(body.length) } });
}

function entry(repository: FakeRepository, name: string) {
  const bytes = bytesIn(repository, name);
  const isLarge = repository.large?.includes(name) ?? name.endsWith(".safetensors");
  const listed = { type: "file", path: name, size: bytes.length, oid: isLarge ? "f".repeat(40) : gitSha1(bytes) };
  return isLarge ? { ...listed, lfs: { oid: sha256(bytes), size: bytes.length, pointerSize: 134 } } : listed;
}

function bytesIn({ files }: FakeRepository, name: string): Uint8Array {
  const content = files[name] ?? "";
  return typeof content === "string" ? new TextEncoder().encode(content) : content;
}

export const sha256 = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex");
export const gitSha1 = (bytes: Uint8Array): string =>
  createHash("sha1").update(`blob ${bytes.length}\0`).update(bytes).digest("hex");

const refusal = (status: number, code: string, message: string): Response =>
  Response.json({ error: message }, { status, headers: { "x-error-code": code, "x-error-message": message } });
