import { delimiter } from "node:path";
import { DRIVER_VARIABLES, type DriverManifest, driverManifests } from "../../gpu/vulkan-drivers.ts";
import type { VulkanDevice } from "../../gpu/vulkan-memory.ts";
import { type Check, checkOf, type Finding, guarded } from "./check.ts";
import type { DoctorContext } from "./context.ts";
import { type DriverFacts, judgeDriver, loaderFinding, NOT_TRIED } from "./judge-driver.ts";
import { blameMemory, lacksAddresses, NO_ADDRESSES } from "./memory.ts";
import { selectorOf } from "./probe.ts";
import { ask, said, whereItEnded } from "./runtime.ts";
import { haveOneName, type Named, numbered } from "./same-names.ts";

/** An adapter, and the variables under which its driver is the only one. */
export interface FoundAdapter extends Named {
  readonly env: Readonly<Record<string, string>>;
  /** What `--device` takes for it under these variables. */
  readonly select: string;
  /** Where its driver is from, for people. */
  readonly driver: string;
}

/**
 * The Vulkan loader, then each installed driver as the only one and in a process of its own, then the one that the binary
 * carries. Where the system's way to a GPU is not Vulkan, there are no drivers to tell apart.
 */
export async function* drivers(
  context: DoctorContext,
  adapters: FoundAdapter[],
  hasRuntime: boolean,
): AsyncGenerator<Check> {
  const hasVulkan = process.platform === "linux";
  if (hasVulkan) {
    const manifests = driverManifests(context.env);
    const loader = await ask({ probe: "loader", withRuntime: hasRuntime }, context);
    const [version] = said(loader, "loader");
    const bundled = await bundledAdapters(context, hasRuntime);
    const facts = { version: version?.version ?? null, path: version?.path ?? null, manifests: manifests.length };
    const problem = whereItEnded(loader);
    yield guarded("vulkan-loader", null, () =>
      blameMemory(
        problem,
        loaderFinding(facts, problem, bundled.adapters.length > 0, context, said(loader, "error")[0]?.hint),
      ),
    );
    const installed = version || lacksAddresses(problem) ? manifests : [];
    const looked: DriverFacts[] = [];
    for (const manifest of installed) looked.push(await lookAt(manifest, context, adapters, hasRuntime));
    for (const facts of looked) {
      const others = looked.some((other) => other !== facts && other.usable.length > 0) || bundled.adapters.length > 0;
      const variable = variableNaming(facts.manifest, context.env);
      yield guarded("driver", facts.manifest, () =>
        blameMemory(facts.problem, judgeDriver(facts, others, hasRuntime, variable)),
      );
    }
    if (haveOneName(adapters))
      adapters.splice(0, Infinity, ...numbered(adapters, await allDevices(context, hasRuntime)));
    adapters.push(...bundled.adapters);
    yield checkOf("driver", { subject: "bundled", ...bundled.finding });
    return;
  }
  const { events } = await ask({ probe: "adapters" }, context);
  for (const { adapters: found } of said({ events }, "adapters")) {
    // Without Vulkan Dawn has only the first of a name.
    adapters.push(
      ...found.map((summary) => ({
        summary,
        device: undefined,
        env: {},
        select: summary.name,
        driver: "the system's",
      })),
    );
  }
}

/** All devices of all drivers, in the order in which a node has them; none where one of the drivers ends the process. */
async function allDevices(context: DoctorContext, withRuntime: boolean): Promise<readonly VulkanDevice[]> {
  const asked = await ask({ probe: "driver", withRuntime }, context);
  return said(asked, "devices")[0]?.devices ?? [];
}

/** The variable for which the loader looks at a manifest; undefined where it is in one of the loader's folders. */
const variableNaming = (manifest: string, env: DoctorContext["env"]): string | undefined =>
  [...DRIVER_VARIABLES, "VK_ADD_DRIVER_FILES"].find((name) => env[name]?.split(delimiter).includes(manifest));

const only = (manifest: string): Record<string, string> =>
  Object.fromEntries(DRIVER_VARIABLES.map((name) => [name, manifest]));

async function lookAt(
  { path, library, problem }: DriverManifest,
  context: DoctorContext,
  adapters: FoundAdapter[],
  hasRuntime: boolean,
): Promise<DriverFacts> {
  const own = { manifest: path, library: library ?? null };
  const env = only(path);
  if (problem?.startsWith("ENOENT")) return { ...own, problem, devices: [], usable: [], said: [] };
  const debug = { ...env, VK_LOADER_DEBUG: "error,warn" };
  const asked = await ask({ probe: "driver", withRuntime: hasRuntime }, context, debug);
  if (problem !== undefined) {
    const dies = asked.problem === undefined ? "" : `; the Vulkan loader ${asked.problem} over it`;
    return { ...own, problem: `${problem}${dies}`, devices: [], usable: [], said: [] };
  }
  const [seen] = said(asked, "devices");
  const heard = asked.stderr.filter((line) => /^(ERROR|WARNING)/.test(line)).map(plain);
  const ended = whereItEnded(asked);
  const problemThere = asked.problem !== undefined || lacksAddresses(ended) ? ended! : null;
  if (problemThere !== null) return { ...own, problem: problemThere, devices: [], usable: [], said: heard };
  const devices = seen?.devices ?? [];
  if (devices.length === 0 || !hasRuntime) return { ...own, problem: null, devices, usable: [], said: heard };

  const opened = await ask({ probe: "adapters" }, context, env);
  const [list] = said(opened, "adapters");
  if (!list)
    return { ...own, problem: whereItEnded(opened) ?? "Dawn did not answer", devices, usable: [], said: heard };
  const found = list.adapters.filter(({ bundledDriver }) => !bundledDriver);
  adapters.push(
    ...found.map((summary) => {
      const device = devices.filter(({ name }) => name === summary.name)[summary.nameIndex];
      return { summary, device, env, select: selectorOf(summary), driver: path };
    }),
  );
  // Dawn says of every good device as well that it uses less of it than there is.
  const warnings = list.warnings.filter((line) => line.startsWith("Warning: ") && !line.includes("artificially"));
  return { ...own, problem: null, devices, usable: found.map(({ name }) => name), said: warnings.map(plain) };
}

const plain = (line: string): string => line.replace(/^(ERROR|WARNING|Warning):\s*(\[[^\]]*\])?\s*/, "").trim();

async function bundledAdapters(
  context: DoctorContext,
  hasRuntime: boolean,
): Promise<{ adapters: FoundAdapter[]; finding: Finding }> {
  if (!hasRuntime) return { adapters: [], finding: { status: "skip", found: NOT_TRIED } };
  const env = only(NO_DRIVER);
  const end = await ask({ probe: "adapters" }, context, env);
  const [list] = said(end, "adapters");
  const found = (list?.adapters ?? []).filter(({ bundledDriver }) => bundledDriver);
  const problem = whereItEnded(end) ?? null;
  const usable = found.map(({ name }) => name);
  const heard = list?.warnings ?? [];
  const facts = { manifest: "bundled", library: null, problem, devices: [], usable, said: heard };
  const adapters = found.map((summary) => ({
    summary,
    device: undefined,
    env,
    select: selectorOf(summary),
    driver: "bundled",
  }));
  if (found.length > 0)
    return { adapters, finding: { status: "ok", found: `in this binary: ${found[0]!.description}`, facts } };
  if (process.arch !== "x64")
    return { adapters, finding: { status: "skip", found: "no software driver is made for this machine", facts } };
  if (lacksAddresses(problem))
    return { adapters, finding: { status: "skip", found: `in this binary: ${NO_ADDRESSES}`, facts } };
  const reason = problem ?? heard.at(-1) ?? "it does not say why";
  const finding: Finding = {
    status: "warn",
    found: `the software driver in this binary cannot be used: ${reason}`,
    remedy: "see the checks above; an installed driver does without it",
    facts: { ...facts, problem: reason },
  };
  return { adapters, finding: blameMemory(problem, finding) };
}

/** A manifest that is nowhere: then no driver is installed. */
const NO_DRIVER = "/dev/null/no-driver.json";
