import { describe, expect, test } from "bun:test";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import type { Claim } from "../../src/gpu/claims.ts";
import { hostMemory } from "../../src/gpu/host-memory.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const GIB = 2 ** 30;
const MIB = 2 ** 20;
/** A machine of 16 GiB with 12 GiB to give. */
const MEMINFO =
  "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:   12582912 kB\nCached: 8388608 kB\n";
const UNLIMITED_V1 = "9223372036854771712\n";

/** What the kernel would show below this root. */
function measured(files: Record<string, string>, others: readonly Claim[] = []) {
  using folder = temporaryFolder();
  for (const [path, text] of Object.entries({ "proc/meminfo": MEMINFO, ...files })) {
    mkdirSync(dirname(join(folder.path, path)), { recursive: true });
    writeFileSync(join(folder.path, path), text);
  }
  const { totalBytes, availableBytes, boundBy } = hostMemory(folder.path, others);
  return { totalBytes, availableBytes, boundBy: boundBy.replace(folder.path, "") };
}

const machine = { totalBytes: 16 * GIB, availableBytes: 12 * GIB, boundBy: "the machine" };
const CGROUP = "sys/fs/cgroup";

describe.skipIf(process.platform !== "linux")("the memory that a process can have is", () => {
  test("what the machine has available, without cgroups", () => {
    expect(measured({})).toEqual(machine);
  });

  test("what is free and what files hold, on a kernel that does not say what is available", () => {
    const meminfo = "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 3 kB\n";
    expect(measured({ "proc/meminfo": meminfo }).availableBytes).toBe(123 * 1024);
  });

  test("what the cgroup's limit leaves, and files that it holds in memory do not count (version 2)", () => {
    const files = {
      "proc/self/cgroup": "0::/app\n",
      [`${CGROUP}/cgroup.controllers`]: "cpu memory\n",
      [`${CGROUP}/app/memory.max`]: `${1 * GIB}\n`,
      [`${CGROUP}/app/memory.high`]: "max\n",
      [`${CGROUP}/app/memory.current`]: `${600 * MIB}\n`,
      [`${CGROUP}/app/memory.stat`]: `anon 5\ninactive_file ${100 * MIB}\nactive_file ${200 * MIB}\n`,
    };
    const bound = { totalBytes: GIB, availableBytes: GIB - 300 * MIB, boundBy: "the cgroup /sys/fs/cgroup/app" };
    expect(measured(files)).toEqual(bound);
    // Beyond memory.high nothing is killed, but slowed down until it is of no use.
    expect(measured({ ...files, [`${CGROUP}/app/memory.high`]: `${512 * MIB}\n` })).toEqual({
      ...bound,
      totalBytes: 512 * MIB,
      availableBytes: 212 * MIB,
    });
  });

  test("the least of what the cgroups leave that it lies in, one within the other (version 2)", () => {
    expect(
      measured({
        "proc/self/cgroup": "0::/outer/middle/inner\n",
        [`${CGROUP}/cgroup.controllers`]: "memory\n",
        [`${CGROUP}/outer/memory.max`]: `${2 * GIB}\n`,
        [`${CGROUP}/outer/memory.current`]: `${2 * GIB - 50 * MIB}\n`, // its other children have it
        [`${CGROUP}/outer/middle/memory.max`]: "max\n",
        [`${CGROUP}/outer/middle/inner/memory.max`]: `${1 * GIB}\n`,
        [`${CGROUP}/outer/middle/inner/memory.current`]: `${10 * MIB}\n`,
      }),
    ).toEqual({ totalBytes: GIB, availableBytes: 50 * MIB, boundBy: "the cgroup /sys/fs/cgroup/outer" });
  });

  test("what the limit of version 1 leaves, in a container that sees the path outside of it", () => {
    const files = {
      "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
      [`${CGROUP}/memory/memory.limit_in_bytes`]: `${1 * GIB}\n`,
      [`${CGROUP}/memory/memory.usage_in_bytes`]: `${500 * MIB}\n`,
      [`${CGROUP}/memory/memory.stat`]: `inactive_file 1\ntotal_inactive_file ${100 * MIB}\n`,
    };
    const bound = { totalBytes: GIB, availableBytes: 624 * MIB, boundBy: "the cgroup /sys/fs/cgroup/memory" };
    expect(measured(files)).toEqual(bound);
  });

  test("the machine's where version 1 says none is set, and where a limit is above the machine", () => {
    const path = "proc/self/cgroup";
    const v1 = { [path]: "4:memory:/a\n", [`${CGROUP}/memory/a/memory.limit_in_bytes`]: UNLIMITED_V1 };
    expect(measured(v1)).toEqual(machine);
    const v2 = { [path]: "0::/a\n", [`${CGROUP}/cgroup.controllers`]: "", [`${CGROUP}/a/memory.max`]: `${64 * GIB}\n` };
    expect(measured(v2)).toEqual(machine);
  });

  test("nothing where the cgroup is full, not less than nothing", () => {
    const files = {
      "proc/self/cgroup": "0::/\n",
      [`${CGROUP}/memory.max`]: "1000\n",
      [`${CGROUP}/memory.current`]: "2000\n",
    };
    expect(measured(files).availableBytes).toBe(0);
  });

  test("what ulimit -v leaves of the process's addresses, where that is less", () => {
    const limits = (bytes: string) => ({
      "proc/self/limits": `Limit                     Soft Limit           Hard Limit           Units\nMax address space         ${bytes}           unlimited            bytes\n`,
      "proc/self/status": "Name:\tbun\nVmPeak:\t 9999999 kB\nVmSize:\t 1048576 kB\n",
    });
    expect(measured(limits(`${3 * GIB}`))).toEqual({
      totalBytes: 3 * GIB,
      availableBytes: 0.5 * GIB, // 1 GiB is used, and 1.5 will be beside what a node plans
      boundBy: "this process (ulimit -v)",
    });
    expect(measured(limits(`${GIB / 2}`)).availableBytes).toBe(0);
    expect(measured(limits("unlimited"))).toEqual(machine);
  });

  test("less by what other nodes were promised and have not taken, in a cgroup by that of the nodes in it", () => {
    const others = [
      { outstandingBytes: 1 * GIB, cgroup: "0::/app/one\n" },
      { outstandingBytes: 2 * GIB, cgroup: "3:cpu:/\n0::/apple\n" },
      { outstandingBytes: 0, cgroup: "0::/app\n" },
    ];
    expect(measured({}, others)).toEqual({
      ...machine,
      availableBytes: 9 * GIB,
      boundBy: "the machine, less 3.0 GiB that other nodes were promised",
    });
    const files = {
      "proc/self/cgroup": "0::/app/two\n",
      [`${CGROUP}/cgroup.controllers`]: "memory\n",
      [`${CGROUP}/app/memory.max`]: `${4 * GIB}\n`,
    };
    expect(measured(files, others)).toEqual({
      totalBytes: 4 * GIB,
      availableBytes: 3 * GIB,
      boundBy: "the cgroup /sys/fs/cgroup/app, less 1.0 GiB that other nodes were promised",
    });
    expect(measured(files, [{ outstandingBytes: 20 * GIB, cgroup: "0::/app/one\n" }]).availableBytes).toBe(0);
  });

  test("on this machine no more than the machine's own", () => {
    const { totalBytes, availableBytes } = hostMemory();
    const total = 1024 * Number(/MemTotal:\s+(\d+)/.exec(readFileSync("/proc/meminfo", "utf8"))![1]);
    expect(totalBytes).toBeWithin(1, total + 1);
    expect(availableBytes).toBeWithin(1, totalBytes);
  });
});
