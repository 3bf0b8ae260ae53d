import { sizeFlag } from "../base/bytes.ts";
import type { MeshMachine } from "../server/machines.ts";
import type { MeshConfig, MeshPlan } from "../server/plan-mesh.ts";
import { DEFAULT_SESSIONS } from "../server/plan-node.ts";
import { isLocalhost, LOOPBACK } from "./host.ts";

/** What to type on which machine. */
export interface MeshCommand {
  /** Its place in `machines`. */
  readonly machine: number;
  readonly command: string;
}

/** Where the node before it reaches a node, and how that listens. */
interface Place {
  readonly url: string;
  readonly flags: readonly string[];
}

const FIRST_PORT = 8000;

/** A `meshnet node` for each share, from the tail to the head: nothing that starts is waited for by somebody. */
export function meshCommands({ model, machines, split }: MeshPlan, config: MeshConfig): MeshCommand[] {
  if (!split) return [];
  const places = placesOf(split.shares.map(({ machine }) => ({ ...machines[machine]!, number: machine + 1 })));
  const common = [
    "--model-id",
    config.modelId,
    ...(config.revision === undefined ? [] : ["--revision", config.revision]),
    ...(config.quantization === undefined ? [] : ["--quantization", config.quantization]),
    ...(config.int8Activations ? ["--int8-activations"] : []),
    ...(config.maxContext === undefined ? [] : ["--max-context", `${model.maxContext}`]),
    ...(model.maxSessions === DEFAULT_SESSIONS ? [] : ["--max-sessions", `${model.maxSessions}`]),
  ];
  return split.shares
    .map(({ machine, start, end }, i): MeshCommand => {
      const layers = ["--shard-start", `${start}`, "--shard-end", `${end}`];
      const next = places[i + 1] ? ["--next", places[i + 1]!.url] : [];
      const { limitBytes } = machines[machine]!;
      const limit = limitBytes === null ? [] : ["--memory-limit", sizeFlag(limitBytes)];
      const words = ["meshnet", "node", ...common, ...layers, ...limit, ...places[i]!.flags, ...next];
      return { machine, command: words.map(quoted).join(" ") };
    })
    .toReversed();
}

/** Several may be on one host: each gets a port of its own, that which was said for it or one that is free. */
function placesOf(machines: readonly (MeshMachine & { readonly number: number })[]): Place[] {
  const taken = new Set(
    machines.flatMap(({ host, port, url }) => {
      if (url === null) return port === null ? [] : [placeKey(host!, port)];
      const { hostname, port: own } = new URL(url);
      return [placeKey(hostname, Number(own || "80"))];
    }),
  );
  return machines.map(({ host, port: wanted, url, number }, i) => {
    if (url !== null) return placeOf(new URL(url));
    const name = host ?? `HOST${number}`;
    let port = wanted ?? FIRST_PORT;
    if (wanted === null) while (taken.has(placeKey(name, port))) port++;
    taken.add(placeKey(name, port));
    // Nobody but its own users has to reach the head.
    if (i === 0 && host === null) return { url: "", flags: port === FIRST_PORT ? [] : ["--port", `${port}`] };
    return placeOf(new URL(`http://${name.includes(":") ? `[${name}]` : name}:${port}`), name);
  });
}

const placeKey = (host: string, port: number): string =>
  `${isLocalhost(host) ? LOOPBACK : host.toLowerCase().replace(/^\[|\]$/g, "")} ${port}`;

/** `name`: as it was written, for a URL has it in lower case. */
function placeOf({ href, protocol, pathname, hostname, port }: URL, name = hostname): Place {
  if (protocol !== "http:" || pathname !== "/") return { url: href, flags: [] }; // behind a proxy: how, nobody knows here
  const number = port === "" ? "80" : port;
  const url = `http://${name.includes(":") && !name.startsWith("[") ? `[${name}]` : name}:${number}`;
  return { url, flags: [...listening(name), "--port", number] };
}

function listening(name: string): string[] {
  if (/^localhost\.?$/i.test(name)) return ["--host", LOOPBACK];
  if (isLocalhost(name)) return ["--host", LOOPBACK, "--allow-host", name];
  const isAddress = /^[\d.]+$|:/.test(name) || /^HOST\d+$/.test(name);
  // A machine may take its own name for loopback: it listens everywhere, and answers to the name.
  return isAddress ? ["--host", name.replace(/^\[|\]$/g, "")] : ["--host", "0.0.0.0", "--allow-host", name];
}

/** As a POSIX shell wants it. */
const quoted = (word: string): string =>
  /^[\w@%+=:,./[\]-]+$/.test(word) ? word : `'${word.replaceAll("'", String.raw`'\''`)}'`;
