import { readdirSync, readFileSync, statSync } from "node:fs";
import { homedir } from "node:os";
import { delimiter, join } from "node:path";
import { messageOf } from "../base/errors.ts";

/** A file that tells the Vulkan loader of a driver. */
export interface DriverManifest {
  readonly path: string;
  /** The driver's library as the file names it; undefined where the file cannot be used. */
  readonly library: string | undefined;
  /** What is wrong with the file, or undefined. */
  readonly problem: string | undefined;
}

type Environment = Readonly<Record<string, string | undefined>>;

/** The loader's variables for "these drivers only", by its new and its old name (before 1.3.207). */
export const DRIVER_VARIABLES = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"] as const;

/**
 * The manifests of all Vulkan drivers that the loader would look at on Linux, in its order: those that the environment
 * names, else those in its folders (Vulkan-Loader, docs/LoaderDriverInterface.md, "Driver Discovery on Linux").
 */
export function driverManifests(env: Environment): DriverManifest[] {
  const chosen = DRIVER_VARIABLES.map((name) => env[name]).find((value) => value !== undefined);
  const added = chosen === undefined ? pathsIn(env["VK_ADD_DRIVER_FILES"]) : [];
  const folders = chosen === undefined ? manifestFolders(env) : [];
  return [...pathsIn(chosen), ...added, ...folders].flatMap(filesOf).map(readManifest);
}

/** The folders in which drivers are installed. */
export function manifestFolders(env: Environment): string[] {
  const home = env["HOME"] || homedir();
  const config = [env["XDG_CONFIG_HOME"] || join(home, ".config"), ...pathsIn(env["XDG_CONFIG_DIRS"] || "/etc/xdg")];
  const data = [
    env["XDG_DATA_HOME"] || join(home, ".local/share"),
    ...pathsIn(env["XDG_DATA_DIRS"] || "/usr/local/share:/usr/share"),
  ];
  return [...config, "/etc", ...data].map((folder) => join(folder, "vulkan/icd.d"));
}

const pathsIn = (list: string | undefined): string[] => (list ?? "").split(delimiter).filter(Boolean);

/** A file stands for itself, a folder for the manifests in it, and a path that is not there only where it was named. */
function filesOf(path: string): string[] {
  try {
    if (!statSync(path).isDirectory()) return [path];
    const names = readdirSync(path).filter((name) => name.endsWith(".json"));
    return names.toSorted().map((name) => join(path, name));
  } catch {
    return path.endsWith(".json") ? [path] : [];
  }
}

function readManifest(path: string): DriverManifest {
  try {
    const library: unknown = JSON.parse(readFileSync(path, "utf8"))?.ICD?.library_path;
    if (typeof library === "string") return { path, library, problem: undefined };
    return { path, library: undefined, problem: "it names no library (ICD.library_path)" };
  } catch (error) {
    return { path, library: undefined, problem: messageOf(error) };
  }
}
