import { type Check, type Finding, guarded } from "./check.ts";
import { type ChildEnd, runProbe } from "./child.ts";
import type { DoctorContext } from "./context.ts";
import { blameMemory, lacksAddresses, NO_ADDRESSES } from "./memory.ts";
import type { ProbeEvent, ProbeRequest } from "./probe.ts";

/** What Dawn is built for. */
const LEAST_GLIBC = [2, 34] as const;

export const ask = (
  request: ProbeRequest,
  { self, env, silenceMs }: DoctorContext,
  more: Record<string, string> = {},
): Promise<ChildEnd<ProbeEvent>> => {
  const patience = request.probe === "adapter" ? 3 : 1; // it compiles kernels, which takes some drivers long
  return runProbe(request, { self, env: { ...env, ...more }, silenceMs: silenceMs * patience });
};

/** The events of one kind. */
export const said = <K extends ProbeEvent["event"]>(
  { events }: Pick<ChildEnd<ProbeEvent>, "events">,
  kind: K,
): Extract<ProbeEvent, { event: K }>[] =>
  events.filter((event): event is Extract<ProbeEvent, { event: K }> => event.event === kind);

/** Why a child did not say all that it was to say: "crashed (SIGSEGV) while it ran the kernel add". */
export function whereItEnded(end: ChildEnd<ProbeEvent>): string | undefined {
  if (end.problem === undefined) return said(end, "error")[0]?.message;
  const step = said(end, "step").at(-1)?.what;
  return step === undefined ? end.problem : `${end.problem} while it ${step}`;
}

/** The C library and the C++ runtime; then whether Dawn can be loaded, and how. */
export async function* runtime(context: DoctorContext): AsyncGenerator<Check> {
  const libraries = await ask({ probe: "libraries" }, context);
  const [found] = said(libraries, "libraries");
  const loaded = await ask({ probe: "runtime" }, context);
  const [dawn] = said(loaded, "dawn");
  if (process.platform === "linux") {
    yield guarded("c-library", null, () =>
      found ? cLibrary(found, dawn?.origin.from) : blameMemory(whereItEnded(libraries), librariesUnknown(libraries)),
    );
  }
  yield guarded("gpu-runtime", null, () => blameMemory(whereItEnded(loaded), runtimeFinding(loaded)));
}

function librariesUnknown(libraries: ChildEnd<ProbeEvent>): Finding {
  const problem = whereItEnded(libraries) ?? "it does not say why";
  const facts = { glibc: null, libstdcxx: null, libstdcxxPath: null, bundledRuntimeUsed: false };
  if (lacksAddresses(problem)) return { status: "skip", found: NO_ADDRESSES, facts };
  const remedy = said(libraries, "error")[0]?.hint ?? REPORT;
  return { status: "fail", found: `it cannot be looked at: ${problem}`, remedy, facts };
}

function runtimeFinding(loaded: ChildEnd<ProbeEvent>): Finding {
  const [dawn] = said(loaded, "dawn");
  if (!dawn) {
    const [error] = said(loaded, "error");
    const found = whereItEnded(loaded) ?? "the GPU runtime (Dawn) cannot be loaded, and does not say why";
    if (lacksAddresses(found)) return { status: "skip", found: NO_ADDRESSES, facts: { from: null, reasons: [found] } };
    return { status: "fail", found, remedy: error?.hint ?? REPORT, facts: { from: null, reasons: [found] } };
  }
  const { from, reasons } = dawn.origin;
  const facts = { from, reasons };
  if (from === "file") return { status: "ok", found: "Dawn loads", facts };
  return { status: "ok", found: `Dawn loads from ${from}, for other ways did not work`, details: reasons, facts };
}

const REPORT = "report this, with the output of meshnet doctor --json";

/** `libstdcxxProblem`: why there is none that can be used, in the dynamic linker's words. */
export function cLibrary(
  {
    glibc,
    libstdcxx,
    libstdcxxProblem = null,
  }: { glibc: string | null; libstdcxx: string | null; libstdcxxProblem?: string | null },
  from: string | undefined,
): Finding {
  const version = /\.so\.([\d.]+)$/.exec(libstdcxx ?? "")?.[1] ?? null;
  const usesBundled = from === "memory with the bundled C++ runtime";
  const facts = { glibc, libstdcxx: version, libstdcxxPath: libstdcxx, bundledRuntimeUsed: usesBundled };
  const broken = libstdcxxProblem === null || IS_MISSING.test(libstdcxxProblem) ? "" : ` (${libstdcxxProblem})`;
  const cpp = libstdcxx === null ? `no libstdc++ that can be used${broken}` : `libstdc++ ${version ?? libstdcxx}`;
  const found = `glibc ${glibc ?? "not found"}, ${cpp}`;
  if (glibc === null || isOlder(glibc, LEAST_GLIBC)) {
    return {
      status: "fail",
      found: `${found}: the GPU runtime needs glibc ${LEAST_GLIBC.join(".")}`,
      remedy: "use Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a container of one of these",
      facts,
    };
  }
  if (usesBundled) {
    const own = { found: `${found}; the one in this binary is used`, facts };
    return broken ? { status: "warn", ...own, remedy: `install it anew (${CPP_PACKAGES})` } : { status: "ok", ...own };
  }
  if (libstdcxx !== null || from !== undefined) return { status: "ok", found, facts };
  const remedy = `install the C++ runtime of GCC 12 or newer (${CPP_PACKAGES})`;
  return { status: "fail", found: `${found}, which the GPU runtime needs`, remedy, facts };
}

const CPP_PACKAGES = "Debian, Ubuntu: libstdc++6; Fedora: libstdc++";
const IS_MISSING = /cannot open shared object file: No such file/;

function isOlder(version: string, [major, minor]: readonly [number, number]): boolean {
  const [its = 0, itsMinor = 0] = version.split(".").map(Number);
  return its < major || (its === major && itsMinor < minor);
}
