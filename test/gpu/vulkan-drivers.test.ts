import { afterAll, describe, expect, test } from "bun:test";
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { driverManifests, manifestFolders } from "../../src/gpu/vulkan-drivers.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

function manifest(path: string, content = '{"ICD":{"library_path":"libvulkan_x.so"}}'): string {
  const whole = join(folder.path, path);
  mkdirSync(dirname(whole), { recursive: true });
  writeFileSync(whole, content);
  return whole;
}

const pathsIn = (env: Record<string, string>) => driverManifests(env).map(({ path }) => path);

describe("the manifests of Vulkan drivers", () => {
  const config = manifest("config/vulkan/icd.d/a.json");
  const [second, first] = [manifest("data/vulkan/icd.d/c.json"), manifest("data/vulkan/icd.d/b.json")];
  manifest("data/vulkan/icd.d/readme.txt");
  const xdg = {
    HOME: folder.path,
    XDG_CONFIG_DIRS: join(folder.path, "config"),
    XDG_DATA_DIRS: `${join(folder.path, "missing")}:${join(folder.path, "data")}`,
  };

  test("are found in the loader's folders, in its order", () => {
    const own = (paths: string[]) => paths.filter((path) => path.startsWith(folder.path)); // /etc is the machine's
    expect(own(pathsIn(xdg))).toEqual([config, first, second]);
    expect(manifestFolders({ HOME: "/home/ada" })).toEqual(
      ["/home/ada/.config", "/etc/xdg", "/etc", "/home/ada/.local/share", "/usr/local/share", "/usr/share"].map(
        (base) => join(base, "vulkan/icd.d"),
      ),
    );
  });

  test("are those that a variable names, files or folders, and none where it names none", () => {
    expect(pathsIn({ ...xdg, VK_DRIVER_FILES: `${second}:${dirname(config)}` })).toEqual([second, config]);
    expect(pathsIn({ ...xdg, VK_ICD_FILENAMES: second })).toEqual([second]);
    expect(pathsIn({ ...xdg, VK_ICD_FILENAMES: second, VK_DRIVER_FILES: config })).toEqual([config]);
    expect(pathsIn({ ...xdg, VK_ICD_FILENAMES: "" })).toEqual([]);
  });

  test("can be added to", () => {
    const added = manifest("elsewhere/d.json");
    expect(pathsIn({ ...xdg, VK_ADD_DRIVER_FILES: added })[0]).toBe(added);
    expect(pathsIn({ ...xdg, VK_ADD_DRIVER_FILES: added, VK_DRIVER_FILES: config })).toEqual([config]);
  });

  test("say which library they name, or what is wrong with them", () => {
    const files = [config, manifest("bad.json", "{"), manifest("empty.json", "{}"), "/nonexistent/x.json"];
    const [good, bad, empty, missing] = driverManifests({ VK_DRIVER_FILES: files.join(":") });
    expect(good).toEqual({ path: config, library: "libvulkan_x.so", problem: undefined });
    expect(bad!.problem).toContain("JSON");
    expect(empty!.problem).toContain("library_path");
    expect(missing!.problem).toContain("ENOENT");
  });
});
