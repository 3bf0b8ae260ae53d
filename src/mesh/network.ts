import { messageOf } from "../base/errors.ts";

/** What the commonest failures of a connection are called. */
const PROBLEMS: Record<string, string> = {
  ECONNREFUSED: "nothing listens there",
  ConnectionRefused: "nothing listens there",
  ECONNRESET: "it broke the connection off",
  ENOTFOUND: "there is no such host",
  EHOSTUNREACH: "there is no way to that host",
  ENETUNREACH: "there is no way to that network",
  ETIMEDOUT: "it does not answer",
};

/** For calls of nodes: what people write goes to the node alone, neither by way of HTTP_PROXY nor where a redirect leads. */
export const DIRECT = { redirect: "manual", proxy: false } as unknown as RequestInit;

/** The URL of a node, with a slash at its end so that a path before it (a reverse proxy's) stays; undefined where it is none. */
export function plainUrl(text: string): string | undefined {
  const url = URL.parse(text);
  // It is told to whoever asks /info.
  if (!url || url.username || url.password || url.search || url.hash || !/^https?:$/.test(url.protocol))
    return undefined;
  return url.href.replace(/\/*$/, "/");
}

/** A failed fetch in words, rather than in the library's. */
export function networkProblem(cause: unknown): string {
  const code = String((cause as { code?: unknown } | null)?.code);
  return Object.hasOwn(PROBLEMS, code) ? PROBLEMS[code]! : messageOf(cause);
}
