import { UserError } from "../base/errors.ts";
import { cut } from "../base/quote.ts";

export interface Allowed {
  /** Names and addresses under which this node may be called, beside loopback: the host it is bound to, …. */
  readonly hosts: readonly string[];
  /** Origins of web pages that may call it, as a browser writes them: `https://example.org`. */
  readonly origins: readonly string[];
  /** Whether the node has a page itself, which may call the host that it came from. */
  readonly ownPage: boolean;
}

/**
 * Keeps web pages out. A page may send a `text/plain` POST to any address without asking (its `Origin` tells), and a
 * name that its owner points at 127.0.0.1 looks like the page's own server (its `Host` tells).
 *
 * Throws UserError `forbidden_host` or `forbidden_origin`.
 */
export function guard(headers: Headers, allowed: Allowed): void {
  const host = headers.get("Host") ?? "";
  const name = hostName(host);
  if (name === undefined || !(isLoopback(name) || allowed.hosts.some((known) => hostName(known) === name))) {
    throw new UserError(
      "forbidden_host",
      `the call is addressed to the host "${cut(host)}", and this node answers to loopback${listed(allowed.hosts)}`,
      "call it by one of these names, or start it with --allow-host and that name",
    );
  }
  const origin = headers.get("Origin");
  if (origin === null || allowed.origins.includes(origin)) return;
  if (allowed.ownPage && isOwnPage(origin, host, headers.get("Sec-Fetch-Site"))) return;
  throw new UserError(
    "forbidden_origin",
    `a web page of ${cut(origin)} made this call, and this node takes calls from no page${listed(pagesOf(allowed), " but those of ")}`,
    "call it from a program instead",
  );
}

/** Of `name`, `name:port`, `1.2.3.4:port`, `[::1]:port` or a bare IPv6 address; undefined where it is none of them. */
function hostName(host: string): string | undefined {
  const text = host.toLowerCase();
  if (/^[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*$/.test(text)) return text;
  const match = /^(?:\[([0-9a-f:.]+)\]|([^:[\]/@\s]+?)\.?)(?::\d{1,5})?$/.exec(text);
  return match?.[1] ?? match?.[2];
}

/**
 * Whether the page came from the very host and port that it calls, of which `guard` knows that it is this node. Behind a
 * proxy that has the encryption, `http` and `https` are two origins of one host: there browsers tell in `Sec-Fetch-Site`.
 */
function isOwnPage(origin: string, host: string, site: string | null): boolean {
  const isSameHost = [`http://${host}`, `https://${host}`].some((own) => URL.parse(own)?.origin === origin);
  return isSameHost && (site === null || site === "same-origin");
}

export const isLoopback = (name: string): boolean =>
  name === "localhost" || name === "::1" || /^127\.\d{1,3}\.\d{1,3}\.\d{1,3}$/.test(name);

const pagesOf = ({ ownPage, origins }: Allowed): string[] => [...(ownPage ? ["its own"] : []), ...origins];

const listed = (names: readonly string[], before = ", "): string => (names.length > 0 ? before + names.join(", ") : "");
