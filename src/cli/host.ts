import { isIPv4, isIPv6 } from "node:net";
import { UserError } from "../base/errors.ts";

/** Where other machines reach a node: a name or an address without brackets, and perhaps a port. */
export interface HostAndPort {
  readonly host: string;
  readonly port?: number;
}

/**
 * `gpu-box`, `gpu-box:8001`, `10.0.0.1:8001`, `::1`, `[::1]:8001`. What has no brackets and is an IPv6 address as a whole is
 * one, without a port. Throws UserError `bad_usage` for what no URL could name, or nobody could reach.
 */
export function hostAndPort(flag: string, text: string): HostAndPort {
  const [, bracketed, name, portText] = /^(?:\[([^\]]*)\]|([^:]*))(?::(.*))?$/s.exec(text) ?? [];
  const isBare = isIPv6(text);
  const host = isBare ? text : (bracketed ?? name ?? text);
  const problem = isBare || bracketed !== undefined ? problemOfV6(host) : problemOfName(host);
  if (problem) {
    const hint =
      "give a name or an address under which the other machines reach it, as gpu-box, 10.0.0.1:8001 or [fd00::1]:8001";
    throw new UserError("bad_usage", `${flag} ${text}: ${problem}`, hint);
  }
  if (isBare || portText === undefined) return { host };
  const port = /^\d{1,5}$/.test(portText) ? Number(portText) : 0;
  if (port >= 1 && port <= 65_535) return { host, port };
  throw new UserError("bad_usage", `${flag} ${text}: "${portText}" is no port`, "give one from 1 to 65535");
}

/** Where a node listens by itself, and what `localhost` means. */
export const LOOPBACK = "127.0.0.1";

/** By which every machine calls itself, and nobody else reaches it. */
export const isLocalhost = (host: string): boolean => /^(.+\.)?localhost\.?$/i.test(host);

function problemOfV6(host: string): string | undefined {
  if (!isIPv6(host) || host.includes("%")) return `"${host}" is no address that a URL can have`;
  return new URL(`http://[${host}]`).hostname === "[::]" ? EVERYWHERE(host) : undefined;
}

function problemOfName(host: string): string | undefined {
  const isName = host.length <= 253 && host.split(".").every((label) => /^\w([\w-]{0,61}\w)?$/.test(label));
  // What ends in a number is an IPv4 address for a URL, and 1.2.3 another one than somebody meant.
  const isAsWritten = URL.parse(`http://${host}`)?.hostname === host.toLowerCase();
  if (!isName || !isAsWritten) return `"${host}" is no host`;
  return isIPv4(host) && host === "0.0.0.0" ? EVERYWHERE(host) : undefined;
}

const EVERYWHERE = (host: string): string => `${host} is every address of a machine, and leads to none`;
