import { afterAll, describe, expect, test } from "bun:test";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { silentLogger } from "../../src/base/log.ts";
import { guarded } from "../../src/server/doctor/check.ts";
import { runProbe } from "../../src/server/doctor/child.ts";
import { drivers } from "../../src/server/doctor/drivers.ts";
import { type DriverFacts, judgeDriver } from "../../src/server/doctor/judge-driver.ts";
import { judgeClock } from "../../src/server/doctor/network.ts";
import { cLibrary } from "../../src/server/doctor/runtime.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** As Mesa 22.3.6 of Debian 12 and Dawn (webgpu 0.6.2) said it on a machine with both. */
const OLD_MESA: DriverFacts = {
  manifest: "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json",
  library: "/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so",
  problem: null,
  devices: [
    {
      name: "llvmpipe (LLVM 15.0.6, 256 bits)",
      type: "cpu",
      vendorId: 65541,
      deviceId: 0,
      apiVersion: "1.3.230",
      driver: { name: "llvmpipe", info: "Mesa 22.3.6 (LLVM 15.0.6)" },
      uuid: "76616c2d257300000000000000000000",
      heaps: [{ sizeBytes: 2147483648, isDeviceLocal: true }],
    },
  ],
  usable: [],
  said: ["Vulkan shaderUniform*ArrayDynamicIndexing required."],
};

const withDevice = (change: Partial<DriverFacts["devices"][number]>): DriverFacts => ({
  ...OLD_MESA,
  devices: [{ ...OLD_MESA.devices[0]!, ...change }],
});

describe("a driver that the GPU runtime refuses", () => {
  test("is too old where it says so, and the remedy names the version that is not", () => {
    const { status, found, details, remedy } = judgeDriver(OLD_MESA, true);
    expect(status).toBe("warn");
    expect(found).toContain("refuses llvmpipe (LLVM 15.0.6, 256 bits): Mesa 22.3.6 is older than 23.1");
    expect(details).toEqual(OLD_MESA.said);
    expect(remedy).toContain("install Mesa 23.1 or newer");
  });

  test("is a failure where no other device is there, or where it is a GPU's", () => {
    expect(judgeDriver(OLD_MESA, false).status).toBe("fail");
    expect(judgeDriver(withDevice({ type: "discrete" }), true).status).toBe("fail");
  });

  test.each([
    ["Mesa 23.0.4-0ubuntu1~22.04.1", "Mesa 23.0.4-0ubuntu1~22.04.1 is older"],
    ["Mesa 23.1.0", "ArrayDynamicIndexing"],
    ["535.183.01", "ArrayDynamicIndexing"], // NVIDIA's
  ])("is not called too old unless it is: %s", (info, reason) => {
    expect(judgeDriver(withDevice({ driver: { name: "some driver", info } }), true).found).toContain(reason);
  });

  test("is fine where each of its devices is taken", () => {
    const facts = { ...OLD_MESA, usable: OLD_MESA.devices.map(({ name }) => name), said: [] };
    expect(judgeDriver(facts, false)).toMatchObject({ status: "ok" });
  });

  test("is not blamed where the GPU runtime does not load at all", () => {
    expect(judgeDriver(OLD_MESA, true, false)).toMatchObject({
      status: "skip",
      found: expect.stringContaining("Mesa 22.3.6 (LLVM 15.0.6): not tried, for the GPU runtime does not load"),
    });
  });

  test("without a device is nothing to worry about, unless the loader did not take it", () => {
    const none = { ...OLD_MESA, devices: [] };
    expect(judgeDriver({ ...none, said: ["Failed to detect any valid GPUs"] }, false).status).toBe("skip");
    const refused = judgeDriver(
      { ...none, said: ["libz.so: no such file", "vkCreateInstance: Found no drivers!"] },
      true,
    );
    expect(refused).toMatchObject({ status: "warn", found: expect.stringContaining("libz.so: no such file") });
  });
});

test("a driver that hangs is ended and named", async () => {
  const library = join(folder.path, "libhang.so");
  Bun.spawnSync(["mkfifo", library]); // the dynamic linker waits for whoever writes into it
  const manifest = join(folder.path, "hanging.json");
  const ICD = { library_path: library, api_version: "1.3.0" };
  writeFileSync(manifest, JSON.stringify({ file_format_version: "1.0.0", ICD }));
  const context = {
    env: { ...process.env, VK_DRIVER_FILES: manifest },
    log: silentLogger,
    self: [process.execPath, join(import.meta.dir, "../../src/index.ts")],
    silenceMs: 2_000,
    quick: true,
    device: "auto",
  };
  const checks = await Array.fromAsync(drivers(context, [], true));
  const hanging = checks.find(({ subject }) => subject === manifest)!;
  expect(hanging).toMatchObject({
    status: "fail",
    found: "hanging.json: did not come back within 2 s while it was asked for its devices",
    remedy: expect.stringContaining(library),
  });
  expect(checks.at(-1)).toMatchObject({ subject: "bundled" });
}, 30_000);

describe("a probe in a process of its own", () => {
  const probe = (script: string, silenceMs = 10_000) =>
    runProbe({}, { self: ["sh", "-c", script], env: process.env, silenceMs });

  test("is heard although its driver writes on stdout, and its events although it ends badly", async () => {
    const { events, problem, stderr } = await probe(`echo noise; echo '{"event":"a"}'; echo 3; echo oh >&2; exit 7`);
    expect({ events, problem, stderr }).toEqual({
      events: [{ event: "a" }],
      problem: "ended the process (exit code 7)",
      stderr: ["oh"],
    });
  });

  test("is told apart by how it ended", async () => {
    expect((await probe("exit 0")).problem).toBeUndefined();
    expect((await probe("kill -SEGV $$")).problem).toBe("crashed (SIGSEGV)");
    expect((await probe("exec sleep 30", 300)).problem).toBe("did not come back within 0.3 s");
  });
});

describe("a check that breaks", () => {
  test("has failed, with the way out that the error knows", async () => {
    const user = new UserError("no_device", "no device was found", "install a driver");
    const check = await guarded("device", null, () => Promise.reject(user));
    expect(check).toMatchObject({
      id: "device",
      status: "fail",
      found: "no device was found",
      remedy: "install a driver",
    });
  });

  test("has failed where it is a bug of ours too", async () => {
    const check = await guarded("cache", "x", () => {
      throw new TypeError("undefined is not an object");
    });
    expect(check).toMatchObject({ id: "cache", subject: "x", status: "fail" });
    expect(check.found).toBe("this check broke: undefined is not an object");
  });
});

describe("the C library", () => {
  const both = { glibc: "2.36", libstdcxx: "/usr/lib/libstdc++.so.6.0.30" };

  test("is fine from glibc 2.34 on, with a C++ runtime", () => {
    expect(cLibrary(both, "file")).toMatchObject({ status: "ok", found: "glibc 2.36, libstdc++ 6.0.30" });
    expect(cLibrary({ ...both, glibc: "2.34" }, "file").status).toBe("ok");
    expect(cLibrary({ ...both, glibc: "3.0" }, "file").status).toBe("ok");
  });

  test.each(["2.31", "2.4", "1.99"])("is too old as glibc %s", (glibc) => {
    const { status, found, remedy } = cLibrary({ ...both, glibc }, undefined);
    expect({ status, found }).toMatchObject({ status: "fail", found: expect.stringContaining("needs glibc 2.34") });
    expect(remedy).toContain("Debian 12");
  });

  test("may lack the C++ runtime where the binary has one, and only there", () => {
    const none = { ...both, libstdcxx: null };
    expect(cLibrary(none, "memory with the bundled C++ runtime").status).toBe("ok");
    expect(cLibrary(none, undefined)).toMatchObject({ status: "fail", remedy: expect.stringContaining("libstdc++6") });
  });
});

describe("the clock", () => {
  const now = Date.UTC(2027, 5, 1, 12);
  const offBy = (seconds: number) => judgeClock(now, { ourMs: now, theirMs: now - seconds * 1000 });

  test.each([
    [0, "ok"],
    [60, "ok"],
    [61, "warn"],
    [-300, "warn"],
    [301, "fail"],
    [-86_400, "fail"],
  ] as const)("that is %d s off is %s", (seconds, status) => {
    const finding = offBy(seconds);
    expect(finding.status).toBe(status);
    expect(finding.found).toContain(`${Math.abs(seconds)} s ${seconds < 0 ? "behind" : "ahead of"} the Hub's`);
    expect(finding.remedy !== undefined).toBe(status !== "ok");
  });

  test("is plausible by itself, or not", () => {
    expect(judgeClock(now, undefined).status).toBe("ok");
    expect(judgeClock(0, undefined)).toMatchObject({ status: "fail", found: expect.stringContaining("1970-01-01") });
    expect(judgeClock(Date.UTC(2120, 0), undefined).status).toBe("fail");
  });
});
