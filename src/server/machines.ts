import { UserError } from "../base/errors.ts";
import { quote } from "../base/quote.ts";
import { type PeerReport, probePeer } from "../mesh/probe.ts";
import { PROTOCOL_VERSION } from "../protocol/headers.ts";
import type { MemoryInfo } from "../protocol/info.ts";

/** A machine as somebody describes it; what is missing of a running node is asked. */
export interface MachineSpec {
  /** A name or address under which the other machines reach it. */
  readonly host?: string;
  /** On which its node shall listen. */
  readonly port?: number;
  /** A node that runs on it. */
  readonly url?: string;
  readonly memoryBytes?: number;
  /** At which weights are read from its device memory. */
  readonly bytesPerSecond?: number;
}

/** What is assumed of machines and of the way between them where nothing is said and nothing can be asked. */
export interface Assumptions {
  readonly bytesPerSecond: number;
  readonly passSeconds: number;
  readonly roundTripSeconds: number;
  readonly linkBytesPerSecond: number;
}

export const ASSUMED: Assumptions = {
  bytesPerSecond: 100e9, // an entry-level graphics card, or a laptop's shared memory
  passSeconds: 0.001, // starting kernels, reading one result back, HTTP
  roundTripSeconds: 0.0005, // a wired network in one place
  linkBytesPerSecond: 125e6, // 1 Gbit/s
};

/** Where a number is from. */
export type Source = "given" | "measured" | "assumed";

export interface MeshMachine {
  /** Its host, where that is known. */
  readonly host: string | null;
  /** On which its node shall listen, where that is said. A node that runs listens where its URL says. */
  readonly port: number | null;
  readonly url: string | null;
  /** The adapter that its node computes on. */
  readonly device: string | null;
  /** Null where nobody knows, and only the limit counts. */
  readonly memoryBytes: number | null;
  readonly memorySource: Source;
  /** The `--memory-limit` of its node: what meshnet itself may take, beside the driver. */
  readonly limitBytes: number | null;
  readonly bytesPerSecond: number;
  readonly speedSource: Source;
  /** What a pass takes beside reading weights; 0 where it is in the measured speed. */
  readonly passSeconds: number;
  /** To it and back, and what goes through: from this machine, not from the one before it. */
  readonly roundTripSeconds: number;
  readonly linkBytesPerSecond: number;
  readonly linkSource: Source;
  /** What could not be measured, and why. */
  readonly problems: readonly string[];
}

/**
 * Completes what is said of each machine: by asking the node that runs on it, else by the assumptions.
 * @throws UserError `bad_usage` where nobody knows a machine's memory, or where two URLs lead to one node; `not_supported` where one
 * speaks another protocol version, `next_nonsense` where it tells what cannot be; what `probePeer` throws.
 */
export async function describeMachines(
  specs: readonly MachineSpec[],
  assumed: Assumptions & { readonly linkSource: Source },
): Promise<MeshMachine[]> {
  const machines: MeshMachine[] = [];
  const urls = new Map<string, string>();
  // One after another: what is measured is the machine, not their company.
  for (const spec of specs) {
    const report = spec.url === undefined ? undefined : await probePeer(spec.url);
    if (report) {
      checkVersion(report);
      const other = urls.get(report.info.node);
      if (other !== undefined) throw sameNode(other, report.url);
      urls.set(report.info.node, report.url);
    }
    machines.push(describe(spec, assumed, report));
  }
  return machines;
}

/** It could not be in a chain with this meshnet's nodes. */
function checkVersion({ url, info: { v } }: PeerReport): void {
  if (v === PROTOCOL_VERSION) return;
  const problem = `the node ${url} speaks protocol version ${v}, and this meshnet ${PROTOCOL_VERSION}`;
  const hint = "run the same version of meshnet on both; --nodes takes a machine on which no node runs yet";
  throw new UserError("not_supported", problem, hint);
}

function sameNode(one: string, other: string): UserError {
  const problem = one === other ? `--peers has ${one} twice` : `${one} and ${other} are one and the same node`;
  return new UserError("bad_usage", problem, "leave one of them away: each machine is counted once");
}

function describe(
  spec: MachineSpec,
  assumed: Assumptions & { readonly linkSource: Source },
  report: PeerReport | undefined,
): MeshMachine {
  const { host = null, port = null, bytesPerSecond = assumed.bytesPerSecond, memoryBytes } = spec;
  const speedSource = spec.bytesPerSecond === undefined ? "assumed" : "given";
  const { passSeconds, roundTripSeconds, linkBytesPerSecond, linkSource } = assumed;
  if (!report) {
    if (memoryBytes === undefined) throw new UserError("bad_usage", "a machine without memory", "give it, as 8GiB");
    const way = { roundTripSeconds, linkBytesPerSecond, linkSource };
    const memory = { memoryBytes, memorySource: "given" as const, limitBytes: null };
    const own = { host, port, url: null, device: null, ...memory, problems: [] };
    return { ...own, bytesPerSecond, speedSource, passSeconds, ...way };
  }

  const { info, tokenSeconds, uploadBytesPerSecond } = report;
  const problems = [...report.problems];
  const weightBytes = info.weight_bytes_per_token;
  if (spec.bytesPerSecond === undefined) checkBytes(report, { weight_bytes_per_token: weightBytes }, "=24GiB@900GB/s");
  const isMeasured = spec.bytesPerSecond === undefined && tokenSeconds && weightBytes;
  if (tokenSeconds && !weightBytes) problems.push("speed: it does not say how much a token reads (an older meshnet)");
  return {
    host: host ?? new URL(report.url).hostname,
    port: null,
    url: report.url,
    device: info.device,
    ...(memoryBytes === undefined
      ? { ...peerMemory(report), memorySource: "measured" }
      : { memoryBytes, limitBytes: null, memorySource: "given" }),
    bytesPerSecond: isMeasured ? weightBytes / tokenSeconds : bytesPerSecond,
    speedSource: isMeasured ? "measured" : speedSource,
    passSeconds: isMeasured ? 0 : passSeconds,
    roundTripSeconds: report.roundTripSeconds,
    linkBytesPerSecond: uploadBytesPerSecond ?? linkBytesPerSecond,
    linkSource: uploadBytesPerSecond === null ? linkSource : "measured",
    problems,
  };
}

/** `example`: what to write behind the URL, so that it is not asked. */
function checkBytes({ url }: PeerReport, told: Readonly<Record<string, unknown>>, example: string): void {
  const isBytes = (value: unknown) => Number.isSafeInteger(value) && (value as number) >= 0;
  const odd = Object.entries(told).find(([, value]) => value !== undefined && value !== null && !isBytes(value));
  if (!odd) return;
  const problem = `the node ${url} answered nonsense: its /info has ${odd[0]} ${quote(odd[1])}, which is no number of bytes`;
  const hint = `is this the URL of a meshnet node of this version? What stands behind it is not asked, as ${url}${example}`;
  throw new UserError("next_nonsense", problem, hint);
}

/** What its device has free, and what it will have free once the node that runs there has stopped. */
function peerMemory(report: PeerReport): Pick<MeshMachine, "memoryBytes" | "limitBytes"> {
  const { url, info } = report;
  const { allocated, limit, available, device_available }: Partial<MemoryInfo> = info.memory ?? {};
  checkBytes(report, { allocated, limit, available, device_available }, "=24GiB");
  const ofDevice = device_available === undefined ? available : device_available;
  const limitBytes = Number.isSafeInteger(limit) ? limit! : null;
  const isKnown = Number.isSafeInteger(allocated) && Number.isSafeInteger(ofDevice);
  if (isKnown) return { memoryBytes: allocated! + ofDevice!, limitBytes };
  if (limitBytes !== null) return { memoryBytes: null, limitBytes }; // as its own check has it
  throw new UserError(
    "bad_usage",
    `the node ${url} does not know how much memory its device (${info.device}) has`,
    `say it behind the URL, as ${url}=24GiB`,
  );
}
