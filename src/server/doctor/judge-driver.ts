import { basename } from "node:path";
import { DRIVER_VARIABLES, manifestFolders } from "../../gpu/vulkan-drivers.ts";
import type { VulkanDevice } from "../../gpu/vulkan-memory.ts";
import type { Finding } from "./check.ts";
import { DEADLY } from "./child.ts";
import type { DoctorContext } from "./context.ts";
import { lacksAddresses, NO_ADDRESSES } from "./memory.ts";

// What was found of the Vulkan loader and of a driver, judged: what it means, and what to do.

/** What one driver said when it was the only one. */
export interface DriverFacts {
  readonly manifest: string;
  readonly library: string | null;
  /** What is wrong with the manifest, the library, or what the process died of. Without a library: of the manifest alone. */
  readonly problem: string | null;
  readonly devices: readonly VulkanDevice[];
  /** Names of those that Dawn takes. */
  readonly usable: readonly string[];
  /** What the loader and Dawn said. */
  readonly said: readonly string[];
}

/** The loader, and whether there is anything for it to load. `hasBundled`: whether the binary's own device is there; `hint`: the way out, where the problem's own is known. */
export function loaderFinding(
  facts: { version: string | null; path: string | null; manifests: number },
  problem: string | undefined,
  hasBundled: boolean,
  { env }: Pick<DoctorContext, "env">,
  hint: string | null = null,
): Finding {
  if (lacksAddresses(problem)) return { status: "skip", found: NO_ADDRESSES, facts };
  const bad = hasBundled ? "warn" : "fail";
  const but = hasBundled ? "; only the software device in this binary can be used" : "";
  if (facts.version === null) {
    const isMissing = problem === undefined || /libvulkan\.so\.1: cannot open shared object/.test(problem);
    const packages = "Debian, Ubuntu: libvulkan1; Fedora: vulkan-loader; Arch: vulkan-icd-loader";
    return isMissing
      ? {
          status: bad,
          found: `there is no Vulkan loader (libvulkan.so.1)${but}`,
          remedy: `install it (${packages})`,
          facts,
        }
      : {
          status: bad,
          found: `the Vulkan loader cannot be used: ${problem}${but}`,
          remedy: hint ?? `install it anew, with what it needs (${packages})`,
          facts,
        };
  }
  if (facts.manifests > 0) return { status: "ok", found: `${facts.version}, ${facts.path ?? "path unknown"}`, facts };
  const variable = DRIVER_VARIABLES.find((name) => env[name] !== undefined);
  const details = variable ? [] : [`looked in ${manifestFolders(env).join(", ")}`];
  return {
    status: bad,
    found: variable
      ? `${facts.version}, but ${variable}=${env[variable]} names no driver${but}`
      : `${facts.version}, but no driver is installed${but}`,
    details,
    remedy: variable ? `unset ${variable}, or name a driver's .json file in it` : INSTALL_DRIVER,
    facts,
  };
}

const INSTALL_DRIVER =
  "install your GPU's Vulkan driver; for AMD, Intel, and computing on the CPU: Mesa 23.1 or newer (Debian, Ubuntu: mesa-vulkan-drivers)";

/** `hasOthers`: whether this machine has a device besides those of this driver; `variable`: that which names the manifest. */
export function judgeDriver(facts: DriverFacts, hasOthers: boolean, hasRuntime = true, variable?: string): Finding {
  const { manifest, problem, devices, usable } = facts;
  const name = basename(manifest);
  const refused = devices.filter((device) => !usable.includes(device.name));
  const reported = { ...facts };
  if (problem !== null) {
    if (variable && problem.startsWith("ENOENT")) {
      const remedy = `unset ${variable}, or name a driver's .json file that is there`;
      return {
        status: "warn",
        found: `${name}: ${variable} names ${manifest}, and there is no such file`,
        remedy,
        facts: reported,
      };
    }
    if (lacksAddresses(problem)) return { status: "skip", found: `${name}: ${NO_ADDRESSES}`, facts: reported };
    const isDeadly = DEADLY.test(problem);
    if (isDeadly && facts.library === null) {
      const remedy = variable ? `remove ${manifest}, or leave it out of ${variable}` : `remove ${manifest}`;
      return { status: "fail", found: `${name}: ${problem}`, details: facts.said, remedy, facts: reported };
    }
    return {
      status: isDeadly ? "fail" : "warn",
      found: `${name}: ${problem}`,
      details: facts.said,
      remedy: isDeadly
        ? `update or remove the driver ${facts.library}; until then set VK_DRIVER_FILES to the .json file of another one`
        : variable
          ? `repair ${manifest}, or unset ${variable}, which names it`
          : `repair or remove ${manifest}`,
      facts: reported,
    };
  }
  if (devices.length === 0) {
    // The loader says which of the two it is: a driver that it does not take, or one that has nothing to drive.
    if (!facts.said.some((line) => line.includes("Found no drivers")))
      return { status: "skip", found: `${name}: this machine has no device for it`, facts: reported };
    const remedy = `install what it lacks (the driver's package anew), or remove ${manifest}`;
    return { status: "warn", found: `${name}: it cannot be loaded: ${facts.said[0]}`, remedy, facts: reported };
  }
  const versions = [...new Set(devices.map(describeDriver))].join(", ");
  if (!hasRuntime) return { status: "skip", found: `${name}: ${versions}: ${NOT_TRIED}`, facts: reported };
  if (refused.length === 0)
    return { status: "ok", found: `${name}: ${versions}, for ${usable.join(", ")}`, facts: reported };
  const isSoftware = refused.every(({ type }) => type === "cpu");
  const old = refused.map(({ driver }) => oldMesa(driver.info)).find(Boolean);
  const reason = old ? `Mesa ${old} is older than 23.1` : (facts.said[0] ?? "it does not say why");
  return {
    status: isSoftware && hasOthers ? "warn" : "fail",
    found: `${name}: ${versions}: the GPU runtime refuses ${refused.map((device) => device.name).join(", ")}: ${reason}`,
    details: facts.said,
    remedy: old
      ? "install Mesa 23.1 or newer (Debian 12: mesa-vulkan-drivers from bookworm-backports; Ubuntu: 24.04 or newer)"
      : "update this driver",
    facts: reported,
  };
}

export const NOT_TRIED = "not tried, for the GPU runtime does not load";

const describeDriver = ({ driver, apiVersion }: VulkanDevice): string =>
  driver.name === "" ? `Vulkan ${apiVersion}` : `${driver.name}, ${driver.info || `Vulkan ${apiVersion}`}`;

/** The version of a Mesa that Dawn does not take, or undefined. */
function oldMesa(info: string): string | undefined {
  const [, version, major, minor] = /^Mesa ((\d+)\.(\d+)\S*)/.exec(info) ?? [];
  const isOld = Number(major) < 23 || (Number(major) === 23 && Number(minor) < 1);
  return isOld ? version : undefined;
}
