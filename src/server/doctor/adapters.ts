import { formatBytes } from "../../base/bytes.ts";
import { inDigits } from "../../base/digits.ts";
import { DRIVER_VARIABLES, driverManifests } from "../../gpu/vulkan-drivers.ts";
import { type Check, type Finding, guarded } from "./check.ts";
import type { DoctorContext } from "./context.ts";
import type { FoundAdapter } from "./drivers.ts";
import { blameMemory } from "./memory.ts";
import { type AdapterFacts, type ProbeEvent, selectorOf, type SpeedFacts } from "./probe.ts";
import type { ChildEnd } from "./child.ts";
import { ask, said, whereItEnded } from "./runtime.ts";

/**
 * What each adapter is, whether its kernels compute what they should, and how fast it is; then which one a node takes, which is
 * returned. `failing`: the drivers and manifests that failed.
 */
export async function* adapters(
  context: DoctorContext,
  found: readonly FoundAdapter[],
  failing: readonly string[] = [],
): AsyncGenerator<Check, AdapterFacts | undefined> {
  for (const adapter of found) {
    const name = selectorOf(adapter.summary);
    const end = await ask({ probe: "adapter", name: adapter.select, quick: context.quick }, context, adapter.env);
    yield guarded("adapter", name, () => blameMemory(whereItEnded(end), describeAdapter(adapter, end)));
    if (said(end, "adapter").length === 0) continue;
    yield guarded("self-test", name, () => blameMemory(whereItEnded(end), judgeKernels(name, end, context.quick)));
    yield guarded("speed", name, () => blameMemory(whereItEnded(end), describeSpeed(name, end, context.quick)));
  }
  const end = await ask({ probe: "default", select: context.device }, context);
  yield guarded("device", null, () => blameMemory(whereItEnded(end), chosen(end, found, context, failing)));
  return said(end, "default")[0]?.adapter;
}

function describeAdapter({ summary, driver }: FoundAdapter, end: ChildEnd<ProbeEvent>): Finding {
  const [seen] = said(end, "adapter");
  if (!seen) {
    const found = `${selectorOf(summary)} cannot be opened: ${whereItEnded(end) ?? "it does not say why"}`;
    return { status: "fail", found, remedy: updateDriver(driver) };
  }
  const adapter = { ...seen.adapter, nameIndex: summary.nameIndex };
  const { features, limits, memory } = adapter;
  const has = [
    features.subgroups ? `subgroups of ${[...new Set(features.subgroups)].join("-")}` : "no subgroups",
    features.f16 ? "f16" : "no f16",
    features.timestamps ? "timestamps" : "no timestamps",
    features.packedDot ? "packed dot" : "no packed dot",
  ];
  const bytes = (value: number | null) => (value === null ? "unknown" : formatBytes(value));
  return {
    status: "ok",
    found: `${selectorOf(adapter)}: ${kindOf(adapter)}, ${adapter.description}`,
    details: [
      `features: ${has.join(", ")}`,
      `limits: buffers ${formatBytes(limits.bufferBytes)}, bindings ${formatBytes(limits.bindingBytes)}, ${limits.bindingsPerKernel} of them to a kernel`,
      `memory: ${bytes(memory.totalBytes)}, ${bytes(memory.availableBytes)} free (${memory.source})`,
    ],
    facts: { ...adapter, driverFile: driver },
  };
}

const kindOf = ({ isSoftware, bundledDriver }: AdapterFacts): string =>
  bundledDriver ? "on the CPU, bundled" : isSoftware ? "on the CPU" : "a GPU";

const updateDriver = (driver: string): string =>
  driver === "bundled" ? "report this, with the output of meshnet doctor --json" : `update the driver (${driver})`;

function judgeKernels(name: string, end: ChildEnd<ProbeEvent>, quick: boolean): Finding {
  const results = said(end, "kernel").map(({ result }) => result);
  const [tested] = said(end, "tested");
  const wrong = results.filter(({ status }) => status === "fail");
  const skipped = results.filter(({ status }) => status === "skip");
  const ended = tested ? undefined : (whereItEnded(end) ?? "ended early");
  const facts = { seconds: tested?.seconds ?? null, kernels: results, ended: ended ?? null };
  const right = results.length - wrong.length - skipped.length;
  if (tested && wrong.length === 0) {
    const some = quick ? " (--quick: not all)" : "";
    const found = `${name}: ${right} kernels compute what they should${some}, ${tested.seconds.toFixed(1)} s`;
    return {
      status: "ok",
      found,
      details: skipped.map(({ kernel, reason }) => `not run: ${kernel}: ${reason}`),
      facts,
    };
  }
  return {
    status: "fail",
    found: ended ? `${name}: ${ended}` : `${name}: ${wrong.length} of ${results.length} kernels compute something else`,
    details: wrong.map(({ kernel, reason }) => `${kernel}: ${reason}`),
    remedy: "do not trust this device: update its driver, or take another one (--device)",
    facts,
  };
}

function describeSpeed(name: string, end: ChildEnd<ProbeEvent>, quick: boolean): Finding {
  if (quick) return { status: "skip", found: `${name}: not measured (--quick)` };
  const [seen] = said(end, "speed");
  if (!seen)
    return {
      status: "fail",
      found: `${name}: ${whereItEnded(end) ?? "not measured"}`,
      remedy: "update its driver, or take another device (--device)",
    };
  const { speed } = seen;
  return { status: "ok", found: `${name}: ${describeRates(speed)}`, facts: { ...speed } };
}

const describeRates = ({ rows, copyBytesPerSecond, gemvBytesPerSecond, gemmFlops }: SpeedFacts): string =>
  [
    `copies ${inDigits(copyBytesPerSecond / 1e9, 2)} GB/s`,
    `reads weights at ${inDigits(gemvBytesPerSecond / 1e9, 2)} GB/s for one token`,
    `${inDigits(gemmFlops / 1e9, 2)} GFLOP/s for ${rows}`,
  ].join(", ");

function chosen(
  end: ChildEnd<ProbeEvent>,
  found: readonly FoundAdapter[],
  context: DoctorContext,
  failing: readonly string[],
): Finding {
  const [device] = said(end, "default");
  if (!device) {
    const [error] = said(end, "error");
    const problem = whereItEnded(end) ?? "no device was found";
    if (end.problem !== undefined && found.length > 0) {
      const good = found.map(({ driver }) => driver).find((one) => one !== "bundled" && !failing.includes(one));
      return { status: "fail", found: `a node would fail: it ${problem}`, remedy: keepAway(good, failing) };
    }
    return { status: "fail", found: problem, remedy: error?.hint ?? "see the checks above" };
  }
  const { name } = device;
  const { isSoftware, bundledDriver } = device.adapter;
  const facts = { name, isSoftware, bundledDriver };
  if (!isSoftware) return { status: "ok", found: `a node takes ${name}`, facts };
  return {
    status: "warn",
    found: `a node takes ${name}, which computes on the CPU: tens of times slower than a GPU`,
    remedy: fasterDevice({ name, bundledDriver }, found, context),
    facts,
  };
}

/** All drivers at once end the process: which is to be kept out of it, and by what. */
function keepAway(good: string | undefined, failing: readonly string[]): string {
  const only = good ? `set VK_DRIVER_FILES=${good}` : "set VK_DRIVER_FILES=none for the software device in this binary";
  if (failing.length === 0) return `${only}: by themselves the drivers work, and together they do not`;
  return good
    ? `${only}, or remove what fails above (${failing.join(", ")})`
    : `remove what fails above (${failing.join(", ")}); until then ${only}`;
}

/** What is nearest to a faster device: another one that is here, a driver that is kept away, or one to be installed. */
export function fasterDevice(
  { name, bundledDriver }: { name: string; bundledDriver: boolean },
  found: readonly Pick<FoundAdapter, "summary">[],
  { device, env }: Pick<DoctorContext, "device" | "env">,
): string {
  const summaries = found.map(({ summary }) => summary);
  const better =
    summaries.find(({ isSoftware }) => !isSoftware) ??
    summaries.find((summary) => bundledDriver && !summary.bundledDriver);
  if (better && device !== "auto")
    return `leave --device ${device} away, or give --device "${selectorOf(better)}": that one is faster than ${name}`;
  const variable = DRIVER_VARIABLES.find((one) => env[one] !== undefined);
  if (bundledDriver && variable !== undefined) {
    const others = driverManifests({ ...env, ...Object.fromEntries(DRIVER_VARIABLES.map((one) => [one, undefined])) });
    const good = others.filter(({ problem }) => problem === undefined).length;
    if (good > 0)
      return `unset ${variable}: it keeps away ${good === 1 ? "a driver that is" : `${good} drivers that are`} installed`;
  }
  return bundledDriver
    ? "install your GPU's Vulkan driver, or Mesa 23.1 or newer (Debian, Ubuntu: mesa-vulkan-drivers)"
    : "install your GPU's Vulkan driver, if this machine has a GPU";
}
