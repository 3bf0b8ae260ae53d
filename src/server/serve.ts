import { lookup } from "node:dns/promises";
import { networkInterfaces } from "node:os";
import { messageOf, UserError } from "../base/errors.ts";
import type { App } from "./app.ts";

type Served = Pick<App, "fetch" | "drain">;

export interface Server {
  /** Of this machine: `http://127.0.0.1:8000/`. */
  readonly url: string;
  readonly port: number;
  /** Refuses new calls with 503, finishes what runs, then closes. */
  stop(): Promise<void>;
}

/** How long a finished reply may take to reach its reader after the node has been told to stop. */
const FAREWELL_MS = 2_000;

/**
 * Serves an app over HTTP. `port` 0 takes any free one.
 *
 * Throws UserError `port_in_use`, or `bad_usage` where the machine does not have the address `hostname`.
 */
export function serve(app: Served, { hostname, port }: { hostname: string; port: number }): Server {
  const server = listen(app, hostname, port);
  return {
    url: server.url.href,
    port: server.port!,
    async stop() {
      await app.drain();
      const cut = setTimeout(() => void server.stop(true), FAREWELL_MS);
      await server.stop();
      clearTimeout(cut);
    },
  };
}

function listen(app: Served, hostname: string, port: number) {
  try {
    return Bun.serve({
      hostname,
      port,
      development: false, // its error page shows source code
      reusePort: false, // true outside of development: two nodes on one port, each getting some of the calls
      idleTimeout: 0, // a forward pass may take longer than any default
      maxRequestBodySize: Number.MAX_SAFE_INTEGER, // Bun's own 413 has no body: the app counts, and says why
      fetch: (request) => app.fetch(request),
    });
  } catch (cause) {
    if (codeOf(cause) === "EADDRINUSE") {
      throw new UserError(
        "port_in_use",
        `port ${port} of ${hostname} is taken by another program`,
        "choose another one (--port), or stop that program",
        { cause },
      );
    }
    const problem = `this node cannot listen on ${hostname} port ${port}: ${messageOf(cause)}`;
    throw new UserError("bad_usage", problem, OWN_ADDRESS, { cause });
  }
}

const OWN_ADDRESS = "give an address of this machine (--host) and a free port (--port)";
const codeOf = (error: unknown): string | undefined => (error as { code?: string }).code;

/** Throws as `serve` would, without serving; and `bad_usage` for a name that no machine has. */
export async function checkPort({ host, port }: { host: string; port: number }): Promise<void> {
  // Bun says of such a name whatever the system said last.
  const known = await lookup(host.replace(/^\[(.*)\]$/, "$1") || "-", { all: true }).catch((cause: unknown) => {
    const problem = `this node cannot listen on "${host}": no address is known for that name (${codeOf(cause) ?? messageOf(cause)})`;
    throw new UserError("bad_usage", problem, OWN_ADDRESS, { cause });
  });
  const foreign = known.map(({ address }) => address).filter((address) => !isOwn(address));
  try {
    void listen({ fetch: async () => new Response(), drain: async () => {} }, host, port).stop(true);
  } catch (cause) {
    if (foreign.length < known.length || (cause as UserError).code === "port_in_use") throw cause;
    const what = foreign.includes(host) ? host : `${host} (${foreign.join(", ")})`;
    const problem = `this node cannot listen on ${what}, which is no address of this machine`;
    throw new UserError("bad_usage", problem, OWN_ADDRESS, { cause });
  }
}

function isOwn(address: string): boolean {
  if (/^127\.|^0\.0\.0\.0$|^::1?$/.test(address)) return true;
  return Object.values(networkInterfaces()).some((own) => own?.some((one) => one.address === address));
}
