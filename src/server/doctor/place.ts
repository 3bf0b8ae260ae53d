import { hostname } from "node:os";
import type { Check } from "./check.ts";
import { freePort } from "./network.ts";

/** Where the node of the printed command listens. */
export interface Place {
  readonly host: string;
  readonly port: number;
  /** Why it is not where it was asked to be. */
  readonly note?: string;
}

/** Where `meshnet node` listens without being told. */
export const DEFAULT_PLACE: Place = { host: "127.0.0.1", port: 8000 };

/** The place that was asked for, as far as the check of the port found that a node can listen there. */
export async function placeAfter({ status, found, facts }: Check, asked: Place): Promise<Place> {
  if (typeof facts["next"] === "number") return { ...asked, port: facts["next"] };
  if (status !== "fail") return asked;
  const { host } = DEFAULT_PLACE;
  const port = (await freePort(host, asked.port)) ?? (await freePort(host, DEFAULT_PLACE.port)) ?? DEFAULT_PLACE.port;
  const left = [
    ...(asked.host === host ? [] : [`--host ${asked.host}`]),
    ...(asked.port === port ? [] : [`--port ${asked.port}`]),
  ];
  const are = left.length === 1 ? "is" : "are";
  return { host, port, note: `${left.join(" and ")} ${are} left away: ${found}` };
}

/** The flags for it. A node that listens everywhere answers to its addresses, and to a name only where it is told. */
export function placeFlags({ host, port }: Place): string[] {
  const name = nameFor(host);
  return [
    ...(host === DEFAULT_PLACE.host ? [] : ["--host", host]),
    ...(name === undefined ? [] : ["--allow-host", name]),
    ...(port === DEFAULT_PLACE.port ? [] : ["--port", `${port}`]),
  ];
}

/** What there is to say of that. */
export function placeNotes({ host, note }: Place): string[] {
  const name = nameFor(host);
  return [
    ...(note === undefined ? [] : [note]),
    ...(name === undefined ? [] : [`where it is called by another name than ${name}, give that to --allow-host`]),
  ];
}

const EVERYWHERE = ["0.0.0.0", "::", "[::]"];

function nameFor(host: string): string | undefined {
  const name = hostname();
  return EVERYWHERE.includes(host) && /^[\w.-]+$/.test(name) ? name : undefined;
}
