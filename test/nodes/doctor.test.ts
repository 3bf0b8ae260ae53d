import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { copyFileSync, existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { hostname } from "node:os";
import { join } from "node:path";
import { SELF_TESTS } from "../../src/engine/self-test/index.ts";
import { CHECK_IDS } from "../../src/server/doctor/check.ts";
import type { Check, DoctorReport } from "../../src/server/doctor/index.ts";
import { type BareRoot, bareRoot, canMakeRoots } from "../support/bare-root.ts";
import { writeCrashingLibrary } from "../support/broken-library.ts";
import { softwareDevices } from "../support/device.ts";
import { NodeProcess, run, type RunOptions } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const ROOT = join(import.meta.dir, "../..");
const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** A port that no other test and no node of somebody's is likely to have. */
const PORT = ["--port", "18765"];

/** The doctor's JSON: nothing else may be on stdout, and nothing on stderr. */
async function examine(words: string[], { env, ...options }: RunOptions = {}) {
  const port = words.includes("--port") ? [] : PORT;
  const { code, stdout, stderr } = await run(["doctor", "--json", "--offline", ...port, ...words], {
    ...options,
    env: { TMPDIR: "/tmp", ...env },
  });
  expect(stderr).toBe("");
  const report: DoctorReport = JSON.parse(stdout);
  expect(code).toBe(report.ok ? 0 : 1);
  const failed = report.checks.filter(({ status }) => status === "fail");
  expect(report.ok).toBe(failed.length === 0);
  for (const check of report.checks) expect(Object.keys(check)).toEqual(KEYS);
  for (const { status, remedy } of report.checks) {
    if (status === "fail" || status === "warn") expect(remedy).toBeTruthy();
  }
  return { report, code, ...lookIn(report) };
}

const KEYS = ["id", "subject", "status", "found", "details", "remedy", "facts"];

const lookIn = ({ checks }: DoctorReport) => ({
  all: (id: Check["id"]) => checks.filter((check) => check.id === id),
  one: (id: Check["id"], subject?: string) =>
    checks.find((check) => check.id === id && (subject === undefined || check.subject === subject))!,
});

const manifest = (name: string, content: object | string): string => {
  const path = join(folder.path, name);
  writeFileSync(path, typeof content === "string" ? content : JSON.stringify(content));
  return path;
};
const driver = (name: string, library_path: string): string =>
  manifest(name, { file_format_version: "1.0.0", ICD: { library_path, api_version: "1.3.0" } });

const [lavapipe, swiftshader] = softwareDevices;
const hasBoth = lavapipe!.adapter !== undefined && swiftshader!.adapter !== undefined;

describe.skipIf(!hasBoth)("the doctor on a machine that is well (needs lavapipe and SwiftShader)", () => {
  let found: Awaited<ReturnType<typeof examine>>;
  let node: NodeProcess;
  beforeAll(async () => {
    node = new NodeProcess(["--model-id", TINY, "--shard-end", "2", "--max-context", "64", "--device", "cpu"]);
    const url = await node.url;
    found = await examine(["--model-id", TINY, "--max-sessions", "2", "--peer", url]);
  }, 120_000);
  afterAll(() => node.stop("SIGKILL"));

  test("finds nothing wrong", () => {
    expect(found.report.checks.filter(({ status }) => status === "fail")).toEqual([]);
    expect(found.report).toMatchObject({ schema: 1, quick: false, ok: true });
    expect([...new Set(found.report.checks.map(({ id }) => id))]).toEqual([...CHECK_IDS]);
  });

  test("describes each device, and runs every kernel on it", async () => {
    for (const { adapter, open } of softwareDevices) {
      expect(found.one("adapter", adapter)).toMatchObject({
        status: "ok",
        facts: { name: adapter, isSoftware: true, features: { f16: expect.any(Boolean), packedDot: true } },
      });
      const { kernels, seconds } = found.one("self-test", adapter).facts as { kernels: unknown[]; seconds: number };
      const device = await open();
      const results = SELF_TESTS.map(async ({ name: kernel, missing }) => {
        const reason = (await missing(device)) ?? null; // a variant of a kernel that the device cannot run
        return { kernel, status: reason === null ? "ok" : "skip", reason };
      });
      expect(kernels).toEqual(await Promise.all(results));
      expect(seconds).toBeGreaterThan(0);
      const speed = found.one("speed", adapter).facts;
      for (const rate of ["copyBytesPerSecond", "gemvBytesPerSecond", "gemmFlops"])
        expect(speed[rate]).toBeGreaterThan(1e6);
    }
    expect(found.one("device").facts["name"]).toBe(lavapipe!.adapter);
  });

  test("says how much of a model fits, and the command that starts the node", async () => {
    const { status, facts } = found.one("model");
    expect(status).toBe("ok");
    expect(facts["rows"]).toEqual(
      ["bfloat16", "int8", "nf4"].map((quantization) =>
        expect.objectContaining({ quantization, maxContext: 256, layers: 4, end: 4 }),
      ),
    );
    const command = facts["command"] as string[];
    expect(command.join(" ")).toBe(
      `meshnet node --model-id ${TINY} --shard-start 0 --shard-end 4 --max-sessions 2 --offline ${PORT.join(" ")}`,
    );
    await using started = new NodeProcess(command.slice(2));
    await started.ready();
  }, 30_000);

  test("names in that command a port that is free, where its own is taken, and the limit as it was given", async () => {
    const url = new URL(await node.url);
    const words = [
      "--quick",
      "--model-id",
      TINY,
      "--shard-start",
      "1",
      "--memory-limit",
      "64MiB",
      "--peer",
      `${url}info`,
    ];
    const { one } = await examine([...words, "--port", url.port, "--host", "localhost"]);
    const free = one("port").facts["next"] as number;
    expect(free).toBeGreaterThan(Number(url.port));
    expect((one("model").facts["command"] as string[]).slice(4).join(" ")).toBe(
      `--shard-start 1 --shard-end 4 --memory-limit 64MiB --offline --host localhost --port ${free}`,
    );
    expect(one("model").details.join("\n")).toMatch(
      /--memory-limit \(64\.0 MiB\) bounds; the driver takes up to 128\.0 MiB/,
    );
    expect(one("peer")).toMatchObject({
      status: "fail",
      found: expect.stringContaining("is not a node's URL"),
      remedy: `give its host and port alone: ${url.origin}`,
    });
  }, 30_000);

  test("says what a model without a tokenizer lacks, instead of a command that would not start", async () => {
    const bare = join(folder.path, "bare");
    mkdirSync(bare);
    for (const name of ["config.json", "model.safetensors"]) copyFileSync(join(TINY, name), join(bare, name));
    const { one, code } = await examine(["--quick", "--model-id", bare]);
    expect(code).toBe(1);
    expect(one("model")).toMatchObject({
      status: "fail",
      found: expect.stringContaining("has neither tokenizer.json nor vocab.json"),
      remedy: expect.stringContaining("tokenizer.json"),
      facts: { command: null },
    });
  }, 30_000);

  test("tests the node that it was told of", () => {
    const { facts } = found.one("peer");
    expect(facts["info"]).toMatchObject({ model_id: TINY, start: 0, end: 2 });
    expect(facts["roundTripSeconds"]).toBeGreaterThan(0);
    expect(facts["uploadBytesPerSecond"]).toBeGreaterThan(0);
    expect(facts["tokenSeconds"]).toBeGreaterThan(0);
  });

  test("gives every fact that docs/doctor.md names, and no other", () => {
    const docs = readFileSync(join(ROOT, "docs/doctor.md"), "utf8");
    const [, block = ""] = /```facts\n([^]*?)```/.exec(docs) ?? [];
    const rows = block
      .trim()
      .split("\n")
      .map((line) => line.split(/ +/));
    const documented = Object.fromEntries(rows.map(([id, ...names]) => [id, names]));
    const given = Object.fromEntries(found.report.checks.map(({ id, facts }) => [id, Object.keys(facts).toSorted()]));
    expect(given).toEqual(documented);
    for (const { id, facts } of found.report.checks) expect(Object.keys(facts).toSorted()).toEqual(given[id]!);
  });
});

/** Lavapipe as it is installed. */
const LAVAPIPE = ["x86_64-linux-gnu", "aarch64-linux-gnu"]
  .map((triple) => `/usr/lib/${triple}/libvulkan_lvp.so`)
  .find((path) => existsSync(path));
const LIBSTDCXX = "/usr/lib/x86_64-linux-gnu/libstdc++.so.6";

describe.skipIf(!hasBoth || !LAVAPIPE)("the doctor looks at a device as a node opens it (needs lavapipe)", () => {
  test("of two devices with one name each has its own, and a model is held by the one that was asked for", async () => {
    const copy = join(folder.path, "libcopy.so");
    const bytes = readFileSync(LAVAPIPE!);
    bytes.write("Mesa 9", bytes.indexOf("Mesa 2")); // another version, by which the two are told apart
    writeFileSync(copy, bytes);
    const files = [driver("installed.json", LAVAPIPE!), driver("copy.json", copy)];
    const env = { VK_DRIVER_FILES: files.join(":"), VK_ICD_FILENAMES: files.join(":") };
    const { one, all } = await examine(["--quick", "--model-id", TINY, "--device", "llvmpipe#1"], { env });
    const [first, second] = [lavapipe!.adapter!, `${lavapipe!.adapter!}#1`];
    expect(
      all("adapter")
        .map(({ subject }) => subject)
        .toSorted(),
    ).toEqual([swiftshader!.adapter!, first, second].toSorted());
    expect([first, second].map((subject) => one("adapter", subject).facts["nameIndex"])).toEqual([0, 1]);
    expect(one("self-test", second)).toMatchObject({ status: "ok" });
    expect(one("device").facts["name"]).toBe(second);
    expect(one("model")).toMatchObject({ status: "ok", facts: { device: second } });

    await using node = new NodeProcess(["--model-id", TINY, "--device", "llvmpipe#1"], { env });
    await node.url;
    expect(node.log).toContain(String(one("adapter", second).facts["description"]));
  }, 60_000);

  test.skipIf(!canMakeRoots || !existsSync(LIBSTDCXX))(
    "with a broken libstdc++ its driver is tried with the one in the binary, and libstdc++ is what is named",
    async () => {
      const script = `mount --bind /dev/null "$(realpath ${LIBSTDCXX})"; exec "$@"`;
      const wrapper = ["unshare", "-rm", "sh", "-ec", script, "sh"];
      const { one, all, code } = await examine(["--quick", "--model-id", TINY], { wrapper });
      expect(code).toBe(0);
      expect(one("c-library")).toMatchObject({
        status: "warn",
        found: expect.stringContaining("libstdc++.so.6: file too short); the one in this binary is used"),
        remedy: expect.stringContaining("libstdc++6"),
      });
      expect(all("driver").filter(({ status }) => status === "warn")).toEqual([]);
      expect(one("self-test", lavapipe!.adapter)).toMatchObject({ status: "ok" });
      expect(one("device").facts["name"]).toBe(lavapipe!.adapter!);
      expect(one("model")).toMatchObject({ status: "ok", facts: { device: lavapipe!.adapter } });
    },
    60_000,
  );
});

describe.skipIf(process.platform !== "linux")("the doctor under ulimit -v", () => {
  test.each([450_000, 2_000_000])(
    "of %d kB, which leaves Bun no way to call libraries, skips what it cannot ask, and says why",
    async (limit) => {
      const wrapper = ["sh", "-c", `ulimit -v ${limit}; exec "$@"`, "sh"];
      const { all, report } = await examine(["--quick"], { wrapper });
      const skipped = [...all("c-library"), ...all("vulkan-loader"), ...all("driver")];
      expect(skipped.length).toBeGreaterThan(2);
      for (const { id, status, found } of skipped)
        expect({ id, status, found }).toEqual({ id, status: "skip", found: expect.stringContaining(NO_ADDRESSES) });
      const failed = report.checks.filter(({ status }) => status === "fail");
      expect(failed.map(({ id }) => id)).toEqual(["system", "device"]);
      for (const { remedy } of failed) expect(remedy).toContain("ulimit -v unlimited");
    },
    30_000,
  );
});

const NO_ADDRESSES = "not tried, for ulimit -v leaves too few addresses";

describe.skipIf(!hasBoth)("the doctor names the driver (needs lavapipe and SwiftShader)", () => {
  test("that crashes, those that cannot be loaded, and goes on with the good ones", async () => {
    const library = join(folder.path, "libcrash.so");
    writeCrashingLibrary(library);
    const bad = {
      crashing: driver("crashing.json", library),
      missing: driver("missing.json", "/nonexistent/libdriver.so"),
      broken: manifest("broken.json", "{"),
      nameless: manifest("nameless.json", {}),
    };
    const { one, report } = await examine(["--quick"], { env: { VK_DRIVER_FILES: Object.values(bad).join(":") } });
    const crashed = one("driver", bad.crashing);
    expect(crashed).toMatchObject({
      status: "fail",
      facts: { library, problem: expect.stringContaining("crashed (SIG") },
    });
    expect(crashed.remedy).toContain(library);
    expect(one("driver", bad.missing)).toMatchObject({
      status: "warn",
      found: expect.stringContaining("/nonexistent/libdriver.so: cannot open shared object file"),
    });
    expect(one("driver", bad.broken)).toMatchObject({ status: "warn", found: expect.stringContaining("JSON") });
    expect(one("driver", bad.nameless).found).toContain("it names no library");
    expect(one("adapter", swiftshader!.adapter)).toMatchObject({ status: "ok" });
    expect(one("self-test", swiftshader!.adapter)).toMatchObject({ status: "ok" });
    // The loader takes all drivers into a node's process.
    expect(one("device")).toMatchObject({ status: "fail", remedy: expect.stringContaining("VK_DRIVER_FILES") });
    expect(report.checks.at(-1)!.id).toBe("port");
  }, 30_000);

  test("whose manifest makes the Vulkan loader crash, and to remove the file", async () => {
    const path = manifest("array.json", { file_format_version: "1.0.0", ICD: [1, 2] });
    const { one } = await examine(["--quick"], { env: { VK_ADD_DRIVER_FILES: path } });
    expect(one("driver", path)).toMatchObject({
      status: "fail",
      found: expect.stringMatching(/names no library .*; the Vulkan loader crashed \(SIG\w+\) over it/),
      remedy: `remove ${path}, or leave it out of VK_ADD_DRIVER_FILES`,
    });
    expect(one("adapter", lavapipe!.adapter)).toMatchObject({ status: "ok" });
    expect(one("device")).toMatchObject({
      status: "fail",
      remedy: expect.stringMatching(/^set VK_DRIVER_FILES=\S+\.json, or remove what fails above \(.*array\.json\)$/),
    });
  }, 30_000);

  test("variable that names none", async () => {
    const { one, code } = await examine(["--quick"], { env: { VK_ICD_FILENAMES: "" } });
    const { status, found, remedy } = one("vulkan-loader");
    expect({ code, status }).toEqual({ code: 0, status: "warn" });
    expect(found).toContain("VK_ICD_FILENAMES= names no driver");
    expect(remedy).toContain("unset VK_ICD_FILENAMES");
    expect(one("device")).toMatchObject({ status: "warn", facts: { bundledDriver: true } });
  }, 30_000);
});

describe("the doctor", () => {
  test("says why a place for models cannot be written, and which port is free instead of a taken one", async () => {
    using taken = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
    const file = manifest("a-file", "no folder");
    const words = ["--quick", "--cache-dir", join(file, "cache"), "--port", String(taken.port)];
    const { code, stdout, stderr } = await run(["doctor", "--offline", ...words]);
    expect({ code, stderr }).toEqual({ code: 1, stderr: "" });
    expect(stdout).not.toContain("\x1b");
    expect(stdout).toMatch(/^fail {2}cache +.*a-file\/cache cannot be written: .*\n +→ .*--cache-dir/m);
    expect(stdout).toMatch(new RegExp(`^warn {2}port +port ${taken.port} .*\n +→ .*--port \\d+, which is free`, "m"));
    expect(stdout).toMatch(/^skip {2}Hub +not asked \(--offline\)$/m);
    expect(stdout.trimEnd()).toMatch(/something is wrong: \d+ ok, \d+ warnings?, 1 failed, \d+ skipped$/);
  }, 30_000);

  test("says when a model, a memory limit or a peer is not to be had, and goes on", async () => {
    const { one, code } = await examine(
      `--quick --model-id ${TINY} --memory-limit 1MiB --peer http://127.0.0.1:9`.split(" "),
    );
    expect(code).toBe(1);
    expect(one("model")).toMatchObject({
      status: "fail",
      found: expect.stringContaining("no layer fits"),
      remedy: expect.stringMatching(
        /below this limit nothing fits, .* --memory-limit \d+(\.\d)?MiB {2}\(raise .* or leave it away\)$/,
      ),
      facts: { command: null },
    });
    const why = /^nf4 with 256 tokens: layers 0-1 need 1\d\.\d MiB on the device, and --memory-limit is 1\.0 MiB$/m;
    expect(one("model").details.join("\n")).toMatch(why);
    expect(one("model").details).toContain(
      "the sizes are what --memory-limit (1.0 MiB) bounds; the driver takes up to 128.0 MiB beside them",
    );
    expect(one("peer")).toMatchObject({
      status: "fail",
      found: expect.stringContaining("nothing listens there"),
      remedy: expect.stringContaining("start it"),
    });
  }, 30_000);

  test.each([
    ["192.0.2.1", [], /^--host 192\.0\.2\.1 is left away: .* which is no address of this machine$/m, 1],
    ["0.0.0.0", ["--host", "0.0.0.0", "--allow-host", hostname()], /^where it is called by another name than /m, 0],
  ])(
    "names in the command no host on which no node can listen, and for every address this machine's name (%s)",
    async (host, words, says, ends) => {
      const { one, code } = await examine(["--quick", "--model-id", TINY, "--host", host]);
      expect(code).toBe(ends);
      const command = one("model").facts["command"] as string[];
      expect(command.slice(command.indexOf("--offline") + 1)).toEqual([...words, ...PORT]);
      expect(one("model").details.join("\n")).toMatch(says);
    },
    30_000,
  );

  test.each([
    [["--shard-start", "3", "--shard-end", "2"], /--shard-start 3 is not below --shard-end 2/],
    [["--max-context", "5000"], /--max-context 5000 is more than the model's 256 positions/],
  ])(
    "goes on after wrong usage of a model, and ends as a node would (%j)",
    async (words, says) => {
      const { code, stdout } = await run([
        "doctor",
        "--offline",
        "--quick",
        "--port",
        "0",
        "--model-id",
        TINY,
        ...words,
      ]);
      expect(code).toBe(2);
      expect(stdout).toMatch(says);
      expect(stdout).toMatch(/^ok +port +127\.0\.0\.1 has a free port$/m);
    },
    30_000,
  );

  test.each([
    [["--port", "http"], /--port http/],
    [["--memory-limit", "much"], /--memory-limit much/],
    [["--shard-start", "1"], /--shard-start is about a model/],
    [["--memory-limit", "1GiB"], /--memory-limit is about a model/],
    [["--quik"], /did you mean --quick/],
    [["--peer", "127.0.0.1:8000"], /"127\.0\.0\.1:8000" is not a node's URL/],
    [["--peer", "http://u:p@h/"], /the URL of a node has a password in it/],
  ])("refuses %j as wrong usage", async (words, says) => {
    const { code, stdout, stderr } = await run(["doctor", ...words]);
    expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
    expect(stderr).toMatch(says);
  });
});

const NATIVE = join(ROOT, "dist/native/linux-x64");
const [LOADER, LIBGCC] = [join(NATIVE, "libvulkan.so"), join(NATIVE, "libgcc_s.so")];

const needsRoots = canMakeRoots ? "" : " (this machine lets no test make roots)";
describe.skipIf(!canMakeRoots || process.arch !== "x64")(`the doctor in a root with${needsRoots}`, () => {
  const inRoot = async (root: BareRoot, env: Record<string, string> = {}) =>
    examine(["--quick"], { wrapper: root.wrapper, env: { HOME: "/", ...env } });

  test("nothing but a C library uses what the binary carries, and says what is missing", async () => {
    using root = bareRoot();
    const { one, code, all } = await inRoot(root, { TMPDIR: "/nonexistent" });
    expect(code).toBe(0);
    expect(one("c-library")).toMatchObject({ status: "ok", facts: { libstdcxx: null, bundledRuntimeUsed: true } });
    expect(one("c-library").found).toContain("no libstdc++ that can be used; the one in this binary is used");
    expect(one("gpu-runtime")).toMatchObject({ status: "ok", facts: { from: "memory with the bundled C++ runtime" } });
    expect(one("vulkan-loader")).toMatchObject({ status: "warn", remedy: expect.stringContaining("libvulkan1") });
    expect(one("vulkan-loader").found).toContain("there is no Vulkan loader");
    expect(one("temporary-folder")).toMatchObject({ status: "warn", remedy: expect.stringContaining("TMPDIR") });
    expect(one("temporary-folder").found).toBe("/nonexistent cannot be written; /tmp is used");
    expect(all("driver").map(({ subject }) => subject)).toEqual(["bundled"]);
    expect(one("device")).toMatchObject({ status: "warn", facts: { bundledDriver: true } });
    expect(one("self-test")).toMatchObject({ status: "ok" });
  }, 30_000);

  test("a loader without drivers, and a libstdc++ that is broken, names both", async () => {
    const libraries = { "libvulkan.so.1": LOADER, "libgcc_s.so.1": LIBGCC, "libstdc++.so.6": undefined };
    using root = bareRoot({ libraries });
    const { one, code } = await inRoot(root);
    expect(code).toBe(0);
    expect(one("vulkan-loader")).toMatchObject({
      status: "warn",
      remedy: expect.stringContaining("mesa-vulkan-drivers"),
    });
    expect(one("vulkan-loader").found).toContain("but no driver is installed");
    expect(one("gpu-runtime").details.join()).toContain("libstdc++.so.6: file too short");
    expect(one("c-library")).toMatchObject({ status: "warn", found: expect.stringContaining("file too short") });
    expect(one("device")).toMatchObject({ status: "warn", facts: { bundledDriver: true } });
  }, 30_000);

  test("no folder that can be written has no device, and says that and why", async () => {
    using root = bareRoot({ libraries: { "libvulkan.so.1": LOADER }, isReadOnly: true });
    const { one, code, all } = await inRoot(root);
    expect(code).toBe(1);
    expect(one("temporary-folder")).toMatchObject({ status: "fail", remedy: expect.stringContaining("set TMPDIR") });
    expect(one("temporary-folder").details.join("\n")).toContain("/tmp: EROFS");
    expect(one("driver", "bundled")).toMatchObject({
      status: "warn",
      found: expect.stringContaining("no folder is writable"),
    });
    expect(all("adapter")).toEqual([]);
    expect(one("device")).toMatchObject({ status: "fail", remedy: expect.stringContaining("install a Vulkan driver") });
    expect(one("cache")).toMatchObject({ status: "fail", remedy: expect.stringContaining("--cache-dir") });
    // The loader needs libgcc_s.so.1, which is not in this root: a node has the one in the binary, and so has the check.
    expect(one("vulkan-loader")).toMatchObject({
      status: "fail",
      found: expect.stringContaining("but no driver is installed"),
    });
    expect(one("gpu-runtime")).toMatchObject({ status: "ok" });
  }, 30_000);
});
