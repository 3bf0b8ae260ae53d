import { afterAll, afterEach, describe, expect, test } from "bun:test";
import { mkdirSync, writeFileSync } from "node:fs";
import { hostname } from "node:os";
import { dirname, join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { silentLogger } from "../../src/base/log.ts";
import { fasterDevice } from "../../src/server/doctor/adapters.ts";
import { checkOf, guarded } from "../../src/server/doctor/check.ts";
import { runProbe } from "../../src/server/doctor/child.ts";
import { drivers } from "../../src/server/doctor/drivers.ts";
import { type DriverFacts, judgeDriver, loaderFinding } from "../../src/server/doctor/judge-driver.ts";
import { system } from "../../src/server/doctor/machine.ts";
import { blameMemory } from "../../src/server/doctor/memory.ts";
import { judgeClock } from "../../src/server/doctor/network.ts";
import { peer } from "../../src/server/doctor/peer.ts";
import { placeAfter, placeFlags, placeNotes } from "../../src/server/doctor/place.ts";
import { cLibrary } from "../../src/server/doctor/runtime.ts";
import { haveOneName, type Named, numbered } from "../../src/server/doctor/same-names.ts";
import { checkPort } from "../../src/server/serve.ts";
import { temporaryFolder } from "../support/safetensors.ts";
import { startNode } from "./tiny-node.ts";

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
    expect((await probe("kill -KILL $$")).problem).toBe("was killed, most likely for lack of memory (SIGKILL)");
    expect((await probe("exec sleep 30", 300)).problem).toBe("did not come back within 0.3 s");
  });
});

describe("what a probe died of for lack of memory", () => {
  const MIB = 2 ** 20;
  const host = { totalBytes: 40 * MIB, availableBytes: 31 * MIB, boundBy: "the cgroup /sys/fs/cgroup/app" };
  const rich = { totalBytes: 2 ** 34, availableBytes: 2 ** 33, boundBy: "the machine" };
  const blamed = { status: "fail", found: "it crashed", remedy: "update the driver" } as const;
  const killed = "was killed, most likely for lack of memory (SIGKILL) while it was opened";

  test.each([
    ["was killed by the system", killed, { host: rich, addresses: undefined }, "more memory: the machine has 8.0 GiB"],
    [
      "was killed in a small cgroup",
      killed,
      { host, addresses: undefined },
      "the cgroup /sys/fs/cgroup/app has 31.0 MiB",
    ],
    ["crashed in a small cgroup", "crashed (SIGSEGV)", { host, addresses: undefined }, "left of 40.0 MiB"],
    [
      "hung",
      "did not come back within 20 s",
      { host: rich, addresses: { limitBytes: 3e9, freeBytes: 5e8 } },
      "ulimit -v",
    ],
    [
      "ended",
      "ended the process (exit code 70)",
      { host: rich, addresses: { limitBytes: 3e9, freeBytes: 5e8 } },
      "ulimit",
    ],
    [
      "was refused",
      "ulimit -v gives this process 2.9 GiB",
      { host: rich, addresses: undefined },
      "ulimit -v unlimited",
    ],
  ])("is not the driver's fault: it %s", (_, problem, state, remedy) => {
    expect(blameMemory(problem, blamed, () => state)).toEqual({ ...blamed, remedy: expect.stringContaining(remedy) });
  });

  test("is told apart from a crash with memory to spare, and from what went well", () => {
    const spare = () => ({ host: rich, addresses: undefined });
    expect(blameMemory("crashed (SIGSEGV) while it ran the kernel add", blamed, spare)).toBe(blamed);
    expect(blameMemory(undefined, blamed, spare)).toBe(blamed);
    const skipped = { status: "skip", found: "not measured (--quick)" } as const;
    expect(blameMemory(killed, skipped, spare)).toBe(skipped);
  });

  test("is foretold by the check of the system", () => {
    expect(system({ host: rich, addresses: undefined }).status).toBe("ok");
    expect(system({ host, addresses: undefined })).toMatchObject({
      status: "warn",
      remedy: expect.stringContaining("more memory"),
      facts: { availableBytes: 31 * MIB, boundBy: host.boundBy, addressBytes: null },
    });
    expect(system({ host: rich, addresses: { limitBytes: 3e9, freeBytes: 5e8 } })).toMatchObject({
      status: "fail",
      found: expect.stringContaining("ulimit -v leaves"),
      facts: { addressBytes: 3e9 },
    });
  });
});

describe("a driver's manifest that a variable names", () => {
  const missing = { ...OLD_MESA, manifest: "/none.json", problem: "ENOENT: no such file", devices: [], said: [] };

  test("and that is not there is neither repaired nor removed: the variable is wrong", () => {
    expect(judgeDriver(missing, true, true, "VK_DRIVER_FILES")).toMatchObject({
      status: "warn",
      found: "none.json: VK_DRIVER_FILES names /none.json, and there is no such file",
      remedy: "unset VK_DRIVER_FILES, or name a driver's .json file that is there",
    });
  });

  test("and that cannot be used is repaired, or not named", () => {
    const broken = { ...missing, problem: "JSON Parse error" };
    expect(judgeDriver(broken, true, true, "VK_ADD_DRIVER_FILES").remedy).toContain("or unset VK_ADD_DRIVER_FILES");
    expect(judgeDriver(broken, true, true).remedy).toBe("repair or remove /none.json");
  });
});

describe("a manifest without a library", () => {
  const manifest = "/etc/vulkan/icd.d/arr.json";
  const nameless = { ...OLD_MESA, manifest, library: null, devices: [], said: [] };
  const problem = "it names no library (ICD.library_path)";

  test("is to be removed where the Vulkan loader dies of it", () => {
    const deadly = { ...nameless, problem: `${problem}; the Vulkan loader crashed (SIGSEGV) over it` };
    expect(judgeDriver(deadly, true)).toMatchObject({
      status: "fail",
      found: `arr.json: ${problem}; the Vulkan loader crashed (SIGSEGV) over it`,
      remedy: `remove ${manifest}`,
    });
    expect(judgeDriver(deadly, true, true, "VK_DRIVER_FILES").remedy).toBe(
      `remove ${manifest}, or leave it out of VK_DRIVER_FILES`,
    );
  });

  test("is a warning where the loader passes it over", () => {
    expect(judgeDriver({ ...nameless, problem }, true).status).toBe("warn");
  });
});

test("a Vulkan loader that cannot be called for lack of addresses is not looked at, and not blamed", () => {
  const facts = { version: null, path: null, manifests: 3 };
  const problem = "ulimit -v gives this process 439.5 MiB of addresses";
  expect(loaderFinding(facts, problem, false, { env: {} })).toEqual({
    status: "skip",
    found: "not tried, for ulimit -v leaves too few addresses",
    facts,
  });
  const hint = "unset BUN_JSC_useJIT";
  expect(loaderFinding(facts, "Bun has no JIT", false, { env: {} }, hint)).toMatchObject({
    status: "fail",
    remedy: hint,
  });
});

describe("devices with one name", () => {
  const adapter = (info: string, change: Partial<Named["summary"]> = {}): Named => ({
    summary: {
      name: "GPU",
      nameIndex: 0,
      description: info,
      vendor: "",
      architecture: "",
      isSoftware: false,
      bundledDriver: false,
      ...change,
    },
    device: { ...OLD_MESA.devices[0]!, name: change.name ?? "GPU", driver: { name: "d", info } },
  });
  const indices = (found: readonly Named[]) =>
    found.map(({ summary }) => `${summary.description} ${summary.name}#${summary.nameIndex}`);

  test("of several drivers are counted in the order in which a node has them", () => {
    const found = [adapter("a"), adapter("b"), adapter("c", { name: "other" })];
    const together = [found[1]!, found[2]!, found[0]!].map(({ device }) => ({ ...device!, heaps: [] }));
    expect(haveOneName(found)).toBe(true);
    expect(indices(numbered(found, together))).toEqual(["a GPU#1", "b GPU#0", "c other#0"]);
  });

  test("and nothing else to tell them apart are counted as they were found, and so are those that nobody lists", () => {
    const found = [adapter("a"), adapter("a"), adapter("a", { nameIndex: 1 })];
    const wanted = ["a GPU#0", "a GPU#1", "a GPU#2"];
    expect(
      indices(
        numbered(
          found,
          found.map(({ device }) => device!),
        ),
      ),
    ).toEqual(wanted);
    expect(indices(numbered(found, []))).toEqual(wanted);
  });

  test("of one driver have their index already, and the bundled one has its own", () => {
    expect(haveOneName([adapter("a"), adapter("a", { nameIndex: 1 })])).toBe(false);
    expect(haveOneName([adapter("a"), adapter("b", { bundledDriver: true })])).toBe(false);
  });
});

describe("the place in the command that starts a node", () => {
  const portCheck = (status: "ok" | "warn" | "fail", next: number | null = null) =>
    checkOf("port", { status, found: "this node cannot listen there", facts: { next } });

  test("is the one that was asked for, or the next free port there", async () => {
    const asked = { host: "10.1.2.3", port: 9000 };
    expect(await placeAfter(portCheck("ok"), asked)).toEqual(asked);
    expect(await placeAfter(portCheck("warn", 9001), asked)).toEqual({ ...asked, port: 9001 });
    expect(placeFlags(asked)).toEqual(["--host", "10.1.2.3", "--port", "9000"]);
    expect(placeNotes(asked)).toEqual([]);
    expect(placeFlags({ host: "127.0.0.1", port: 8000 })).toEqual([]);
  });

  test("is this machine's own where no node can listen on what was asked for, and says why", async () => {
    const place = await placeAfter(portCheck("fail"), { host: "192.0.2.1", port: 0 });
    expect(placeFlags(place)).toEqual(["--port", "0"]);
    expect(placeNotes(place)).toEqual(["--host 192.0.2.1 is left away: this node cannot listen there"]);
  });

  test.each(["0.0.0.0", "::"])("names this machine where it is every address: %s", (host) => {
    const place = { host, port: 8000 };
    expect(placeFlags(place)).toEqual(["--host", host, "--allow-host", hostname()]);
    expect(placeNotes(place).join()).toContain(`another name than ${hostname()}`);
  });
});

describe("where a node takes a slow device, the remedy", () => {
  const adapter = (name: string, isSoftware: boolean, bundledDriver: boolean, nameIndex = 0) => ({
    summary: { name, nameIndex, description: "", vendor: "", architecture: "", isSoftware, bundledDriver },
  });
  const bundled = { name: "SwiftShader", bundledDriver: true };
  const lavapipe = { name: "llvmpipe", bundledDriver: false };
  const both = [adapter("llvmpipe", true, false), adapter("SwiftShader", true, true)];

  test("is to take the faster one that is there, where another was asked for", () => {
    const remedy = fasterDevice(bundled, both, { device: "swift", env: {} });
    expect(remedy).toStartWith('leave --device swift away, or give --device "llvmpipe"');
    const gpus = [adapter("GPU", true, false), adapter("GPU", false, false, 1)];
    expect(fasterDevice(lavapipe, gpus, { device: "cpu", env: {} })).toContain('--device "GPU#1"');
  });

  test("is to unset what keeps an installed driver away", () => {
    const data = join(folder.path, "data");
    const manifest = join(data, "vulkan/icd.d/good.json");
    mkdirSync(dirname(manifest), { recursive: true });
    writeFileSync(manifest, JSON.stringify({ ICD: { library_path: "libgood.so" } }));
    const env = { HOME: folder.path, XDG_DATA_DIRS: data, VK_ICD_FILENAMES: "/none.json" };
    const remedy = fasterDevice(bundled, [adapter("SwiftShader", true, true)], { device: "auto", env });
    expect(remedy).toStartWith("unset VK_ICD_FILENAMES");
  });

  test("is to install a driver where there is none", () => {
    const alone = [adapter("SwiftShader", true, true)];
    expect(fasterDevice(bundled, alone, { device: "auto", env: {} })).toContain("mesa-vulkan-drivers");
    expect(fasterDevice(lavapipe, both, { device: "llvm", env: {} })).toContain("if this machine has a GPU");
  });
});

test.each([
  ["nonsense.invalid", /"nonsense\.invalid": no address is known for that name/],
  ["192.0.2.1", /192\.0\.2\.1, which is no address of this machine/],
  ["", /"": no address is known/],
])("a host that cannot be listened on is named, with why (%p)", async (host, says) => {
  const problem = await checkPort({ host, port: 0 }).catch((error: unknown) => error as UserError);
  expect(problem).toMatchObject({ code: "bad_usage", hint: expect.stringContaining("--host") });
  expect((problem as UserError).message).toMatch(says);
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

describe("a C++ runtime that is there and cannot be loaded", () => {
  const libstdcxxProblem = "/lib/libstdc++.so.6: file too short";
  const broken = { glibc: "2.36", libstdcxx: null, libstdcxxProblem };

  test("is named with why, also where the binary's own takes its place", () => {
    expect(cLibrary(broken, "memory with the bundled C++ runtime")).toMatchObject({
      status: "warn",
      found: `glibc 2.36, no libstdc++ that can be used (${libstdcxxProblem}); the one in this binary is used`,
      remedy: expect.stringContaining("install it anew (Debian, Ubuntu: libstdc++6"),
    });
    expect(cLibrary(broken, undefined)).toMatchObject({
      status: "fail",
      found: expect.stringContaining(libstdcxxProblem),
    });
  });

  test("is another thing than one that nobody installed", () => {
    const libstdcxxProblem = "libstdc++.so.6: cannot open shared object file: No such file or directory";
    expect(cLibrary({ ...broken, libstdcxxProblem }, "memory with the bundled C++ runtime").status).toBe("ok");
  });
});

describe("a node that is slow", () => {
  const running: { stop(): Promise<void> | void }[] = [];
  afterEach(async () => {
    await Promise.all(running.splice(0).map((one) => one.stop()));
  });

  test("has its time in plain digits", async () => {
    const node = await startNode({ start: 0, end: 4, gate: () => Bun.sleep(150) });
    running.push(node);
    const { found } = await peer(node.url);
    expect(found).toMatch(/, \d{3,} ms for a token in its layers$/);
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
