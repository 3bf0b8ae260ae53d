import { type ErrorCode, ERRORS } from "../../base/errors.ts";
import type { Logger } from "../../base/log.ts";
import type { Environment } from "../../hub/settings.ts";
import { adapters } from "./adapters.ts";
import { capacity, type ModelQuestion } from "./capacity.ts";
import { type Check, guarded } from "./check.ts";
import type { DoctorContext } from "./context.ts";
import { drivers, type FoundAdapter } from "./drivers.ts";
import { binary, cache, system, temporaryFolder, type Versions } from "./machine.ts";
import { network, type NetworkOptions } from "./network.ts";
import { peer } from "./peer.ts";
import type { AdapterFacts } from "./probe.ts";
import { runtime } from "./runtime.ts";

export type { Check, CheckStatus } from "./check.ts";
export type { ModelQuestion } from "./capacity.ts";

export interface DoctorOptions extends NetworkOptions {
  readonly versions: Versions;
  /** The words that start this program again: each driver is looked at in a process of its own. */
  readonly self: readonly string[];
  readonly quick: boolean;
  readonly device: string;
  readonly cacheDir?: string;
  /** What can this machine hold of it? */
  readonly model?: Omit<ModelQuestion, "host" | "port">;
  /** URL of a node. */
  readonly peer?: string;
  /** A process that looks at a driver and says nothing for so long hangs. */
  readonly silenceMs?: number;
}

/** The answer of `meshnet doctor --json`, as docs/doctor.md describes it. */
export interface DoctorReport {
  readonly schema: 1;
  readonly version: string;
  /** Whether no check failed. */
  readonly ok: boolean;
  readonly quick: boolean;
  readonly checks: readonly Check[];
}

const SILENCE_MS = 20_000;

/**
 * Looks at everything that a node needs, in order, and gives each check as soon as it is made. A check that goes wrong
 * by itself is one that failed, and the rest goes on; so does a driver that crashes or hangs.
 */
export async function* examine(
  options: DoctorOptions,
  { env, log }: { env: Environment; log: Logger },
): AsyncGenerator<Check> {
  const { self, quick, silenceMs = SILENCE_MS, device } = options;
  const context: DoctorContext = { env, log, self, quick, silenceMs, device };
  yield guarded("binary", null, () => binary(options.versions));
  yield guarded("system", null, system);
  if (process.platform === "linux" && process.arch === "x64") yield guarded("temporary-folder", null, temporaryFolder);

  const found: FoundAdapter[] = [];
  let hasRuntime = false;
  for await (const check of surviving("gpu-runtime", runtime(context))) {
    hasRuntime ||= check.id === "gpu-runtime" && check.status === "ok";
    yield check;
  }
  yield* surviving("driver", drivers(context, found, hasRuntime));
  const seen: Check[] = [];
  for await (const check of surviving("adapter", adapters(context, found))) {
    seen.push(check);
    yield check;
  }

  yield guarded("cache", null, () => cache(env, options.cacheDir));
  let place = { host: options.host, port: options.port };
  for await (const check of surviving("hub", network(context, options))) {
    if (check.id === "port" && typeof check.facts["next"] === "number") place = { ...place, port: check.facts["next"] };
    yield check;
  }
  const { model, peer: url } = options;
  if (model)
    yield guarded("model", model.modelId, () => capacity({ ...model, ...place }, chosenOf(seen), { env, log }));
  if (url !== undefined) yield guarded("peer", url, () => peer(url));
}

export function reportOf(checks: readonly Check[], { versions, quick }: DoctorOptions): DoctorReport {
  const ok = checks.every(({ status }) => status !== "fail");
  return { schema: 1, version: versions.meshnet, ok, quick, checks };
}

/** Whether the question about the model was wrong usage, as `meshnet node` would call it. */
export const isWrongUsage = ({ checks }: DoctorReport): boolean =>
  checks.some(({ id, facts }) => {
    const error = id === "model" ? ERRORS[facts["code"] as ErrorCode] : undefined;
    return error?.exit === ERRORS.bad_usage.exit;
  });

/** A group of checks that breaks between two of them is a failed check too. */
async function* surviving(id: Check["id"], checks: AsyncGenerator<Check>): AsyncGenerator<Check> {
  try {
    yield* checks;
  } catch (error) {
    yield await guarded(id, null, () => Promise.reject(error as Error));
  }
}

/** The device that a node would take, as it was described. */
function chosenOf(checks: readonly Check[]): AdapterFacts | undefined {
  const name = checks.find(({ id }) => id === "device")?.facts["name"];
  const described = checks.find(({ id, subject, facts }) => id === "adapter" && subject === name && "limits" in facts);
  return described?.facts as AdapterFacts | undefined;
}
