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
import { type Place, placeAfter } from "./place.ts";
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
  readonly model?: ModelQuestion;
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
    hasRuntime ||= check.id === "gpu-runtime" && check.status !== "fail";
    yield check;
  }
  const failing: string[] = [];
  for await (const check of surviving("driver", drivers(context, found, hasRuntime))) {
    if (check.status === "fail" && check.subject !== null) failing.push(check.subject);
    yield check;
  }
  const chosen = yield* surviving("adapter", adapters(context, found, failing));

  yield guarded("cache", null, () => cache(env, options.cacheDir));
  let place: Place = { host: options.host, port: options.port };
  for await (const check of surviving("hub", network(context, options))) {
    if (check.id === "port") place = await placeAfter(check, place);
    yield check;
  }
  const { model, peer: url } = options;
  if (model) yield guarded("model", model.modelId, () => capacity(model, place, chosen, { env, log }));
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
async function* surviving<T>(id: Check["id"], checks: AsyncGenerator<Check, T>): AsyncGenerator<Check, T | undefined> {
  try {
    return yield* checks;
  } catch (error) {
    yield await guarded(id, null, () => Promise.reject(error as Error));
    return undefined;
  }
}
