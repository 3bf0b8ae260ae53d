import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { vulkanDevices } from "../../src/gpu/vulkan-memory.ts";
import { softwareDevices } from "../support/device.ts";
import { NodeProcess, run } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** Lavapipe as it is installed. A copy of it under another path is another driver, with a device of the same name. */
const LIBRARY = ["x86_64-linux-gnu", "aarch64-linux-gnu"]
  .map((triple) => `/usr/lib/${triple}/libvulkan_lvp.so`)
  .find((path) => existsSync(path));
const hasLavapipe = softwareDevices.some(({ name, adapter }) => name === "lavapipe" && adapter !== undefined);

describe.skipIf(!LIBRARY || !hasLavapipe)("two devices with one name (lavapipe twice)", () => {
  const manifests = ["one", "other"].map((name) => join(folder.path, `${name}.json`));
  const env = { VK_DRIVER_FILES: manifests.join(":"), VK_ICD_FILENAMES: manifests.join(":") };
  /** What each says of its version, in the order in which Vulkan has them. */
  const versions: string[] = [];

  beforeAll(async () => {
    // The copy says another version, by which the two are told apart here.
    const bytes = readFileSync(LIBRARY!);
    const at = bytes.indexOf("Mesa 2");
    bytes.write("Mesa 9", at);
    writeFileSync(join(folder.path, "libcopy.so"), bytes);
    for (const [index, library] of [LIBRARY!, join(folder.path, "libcopy.so")].entries()) {
      const ICD = { library_path: library, api_version: "1.3.0" };
      writeFileSync(manifests[index]!, JSON.stringify({ file_format_version: "1.0.0", ICD }));
    }
    const script = `import { vulkanDevices } from ${JSON.stringify(join(import.meta.dir, "../../src/gpu/vulkan-memory.ts"))};
      console.log(JSON.stringify(vulkanDevices()));`;
    const child = Bun.spawn([process.execPath, "-e", script], { env: { ...process.env, ...env }, stderr: "inherit" });
    const devices = (await new Response(child.stdout).json()) as ReturnType<typeof vulkanDevices>;
    expect(new Set(devices.map(({ name }) => name)).size).toBe(1);
    versions.push(...devices.map(({ driver }) => /Mesa \d/.exec(driver.info)![0]));
    expect(versions.toSorted()).toEqual(["Mesa 2", "Mesa 9"]);
  });

  test.each([0, 1])(
    "are told apart by their index: a node opens number %p and computes on it",
    async (index) => {
      await using node = new NodeProcess(["--model-id", TINY, "--device", `llvmpipe#${index}`], { env });
      const url = await node.ready();
      expect(node.log).toContain(`llvmpipe: ${versions[index]!}`);
      const body = JSON.stringify({ input_ids: [[1, 2, 3]] });
      const headers = { "Content-Type": "application/json" };
      expect((await fetch(`${url}forward`, { method: "POST", headers, body })).ok).toBe(true);
    },
    60_000,
  );

  test("an index that there is not is refused with those that exist", async () => {
    const { code, stderr } = await run(["node", "--model-id", TINY, "--port", "0", "--device", "llvmpipe#2"], { env });
    expect(code).toBe(1);
    expect(stderr).toMatch(/no device is named "llvmpipe#2"; there is "llvmpipe \(.*\)", "llvmpipe \(.*\)#1"/);
  });
});
