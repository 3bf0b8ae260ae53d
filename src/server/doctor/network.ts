import { UserError } from "../../base/errors.ts";
import { checkHub, type HubState } from "../../hub/check-hub.ts";
import { hubSettings } from "../../hub/settings.ts";
import { checkPort } from "../serve.ts";
import { type Check, checkOf, type Finding, guarded } from "./check.ts";
import type { DoctorContext } from "./context.ts";

export interface NetworkOptions {
  readonly offline: boolean;
  readonly host: string;
  readonly port: number;
}

/** The Hub and the token, the clock by the Hub's, and the port. */
export async function* network(context: DoctorContext, options: NetworkOptions): AsyncGenerator<Check> {
  const settings = hubSettings(context.env);
  let state: HubState | undefined;
  if (options.offline || settings.offline) {
    const variable = options.offline ? "--offline" : "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE";
    const facts = { endpoint: settings.endpoint, token: null, user: null, seconds: null };
    yield checkOf("hub", { status: "skip", found: `not asked (${variable})`, facts });
  } else {
    yield guarded("hub", null, async () => describeHub((state = await checkHub(settings))));
  }
  yield guarded("clock", null, () => judgeClock(Date.now(), state?.clock));
  yield guarded("port", null, () => lookAtPort(options));
}

function describeHub({ endpoint, problem, remedy, seconds, token, user }: HubState): Finding {
  const facts = { endpoint, token, user: user ?? null, seconds: seconds ?? null };
  if (problem !== undefined) return { status: "fail", found: problem, remedy: remedy ?? null, facts };
  const who = token === "none" ? "no token" : `the token is ${user ?? "somebody"}'s`;
  return { status: "ok", found: `${endpoint} answers in ${seconds!.toFixed(2)} s, ${who}`, facts };
}

/** This program is not older than that. */
const EARLIEST = Date.UTC(2026, 0, 1);
const LATEST = Date.UTC(2100, 0, 1);
const MINUTE_MS = 60_000;
const SET_CLOCK = "set the clock (timedatectl set-ntp true): connections over TLS fail where it is wrong";

export function judgeClock(nowMs: number, hub: HubState["clock"]): Finding {
  const time = `${new Date(nowMs).toISOString().slice(0, 19)}Z`;
  const offsetSeconds = hub ? Math.round((hub.ourMs - hub.theirMs) / 1000) : null;
  const facts = { time, offsetSeconds };
  if (nowMs < EARLIEST || nowMs > LATEST)
    return { status: "fail", found: `it is ${time} here, which cannot be`, remedy: SET_CLOCK, facts };
  if (offsetSeconds === null) return { status: "ok", found: `${time}, not compared with another`, facts };
  const off = Math.abs(offsetSeconds) * 1000;
  const found = `${time}, ${Math.abs(offsetSeconds)} s ${offsetSeconds < 0 ? "behind" : "ahead of"} the Hub's`;
  if (off <= MINUTE_MS) return { status: "ok", found, facts };
  return { status: off <= 5 * MINUTE_MS ? "warn" : "fail", found, remedy: SET_CLOCK, facts };
}

/** Taken ports beyond that are not looked past. */
const MOST_PORTS = 100;

async function lookAtPort({ host, port }: NetworkOptions): Promise<Finding> {
  const problem = await portProblem(host, port);
  const own = { host, port, free: problem === undefined };
  if (problem?.code !== "port_in_use") {
    const facts = { ...own, next: null };
    if (problem) return { status: "fail", found: problem.message, remedy: problem.hint, facts };
    if (port === 0) return { status: "ok", found: `${host} has a free port`, facts };
    return { status: "ok", found: `port ${port} of ${host} is free`, facts };
  }
  const next = await freePort(host, port + 1);
  const remedy =
    next === null ? problem.hint : `start the node with --port ${next}, which is free, or stop that program`;
  return { status: "warn", found: problem.message, remedy, facts: { ...own, next } };
}

/** The first free port from `first` on, or null. */
export async function freePort(host: string, first: number): Promise<number | null> {
  for (let port = first; port < Math.min(first + MOST_PORTS, 65_536); port++) {
    if ((await portProblem(host, port)) === undefined) return port;
  }
  return null;
}

async function portProblem(host: string, port: number): Promise<UserError | undefined> {
  try {
    await checkPort({ host, port });
    return undefined;
  } catch (error) {
    if (error instanceof UserError) return error;
    throw error;
  }
}
