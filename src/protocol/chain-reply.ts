import type { ChainNode } from "./chain.ts";
import { malformed } from "./headers.ts";

/** No model has as many layers, and no chain as many nodes. */
const MOST_NODES = 4096;
/** What a node says in one field is shown on one line. */
const MOST_CHARACTERS = 500;

/**
 * The nodes of a reply to `GET /chain`, with the known fields and no others. Throws UserError `malformed` unless they
 * begin at the layer `start` and follow each other.
 */
export function parseChain(text: string, start: number): ChainNode[] {
  let reply: { nodes?: unknown } | null;
  try {
    reply = JSON.parse(text);
  } catch (cause) {
    throw nonsense("is not JSON", cause);
  }
  const list = reply?.nodes;
  if (!Array.isArray(list) || list.length === 0 || list.length > MOST_NODES) throw nonsense("has no list of nodes");
  let expected: number | null = start;
  return list.map((entry) => {
    const node = readNode(entry);
    if (expected === null) throw nonsense("has a node behind one whose end is unknown");
    if (node.start !== expected) throw nonsense(`has a node at layer ${node.start} where ${expected} follows`);
    if (node.end !== null && node.end <= node.start) throw nonsense(`has a node of layers ${node.start}-${node.end}`);
    expected = node.end;
    return node;
  });
}

function readNode(entry: unknown): ChainNode {
  const fields = Object(entry) as Record<keyof ChainNode, unknown>;
  const text = (name: keyof ChainNode): string | null => {
    const value = fields[name];
    if (value === null || value === undefined) return null;
    if (typeof value === "string") return value.slice(0, MOST_CHARACTERS);
    throw nonsense(`has a node whose ${name} is no text`);
  };
  const number = (name: keyof ChainNode): number | null => {
    const value = fields[name];
    if (value === null || value === undefined) return null;
    if (typeof value === "number" && value >= 0) return value;
    throw nonsense(`has a node whose ${name} is no number`);
  };
  const start = number("start");
  if (start === null) throw nonsense("has a node without its first layer");
  return {
    node: text("node"),
    start,
    end: number("end"),
    device: text("device"),
    quantization: text("quantization"),
    sessions: number("sessions"),
    tokens_per_second: number("tokens_per_second"),
    ready: fields.ready === true,
    problem: text("problem"),
  };
}

const nonsense = (problem: string, cause?: unknown) =>
  malformed(`its /chain ${problem}`, "is it a meshnet node of this version?", { cause });
