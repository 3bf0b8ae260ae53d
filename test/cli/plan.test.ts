import { afterAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import type { MeshPlan, MeshSplit, WayOut } from "../../src/server/plan-mesh.ts";
import type { MeshCommand } from "../../src/cli/mesh-commands.ts";
import { writeLargeCheckpoint } from "../support/large-checkpoint.ts";
import { TINY } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const INDEX = join(import.meta.dir, "../../src/index.ts");
const GIB = 2 ** 30;

const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** 96 layers of 12288, GPT-3's shape, and 12 of 768, GPT-2's: headers without weights. */
const LARGE = join(folder.path, "large");
const SMALL = join(folder.path, "small");
writeLargeCheckpoint(LARGE, 96, 10, 12288);
writeLargeCheckpoint(SMALL, 12, 1);

type Printed = MeshPlan & { readonly commands: readonly MeshCommand[] };

async function meshnet(...words: string[]): Promise<{ code: number; stdout: string; stderr: string }> {
  const child = Bun.spawn([process.execPath, INDEX, "plan", ...words], {
    env: { HOME: folder.path, PATH: process.env.PATH },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  return { code: await child.exited, stdout, stderr };
}

async function planned(model: string, nodes: string, ...words: string[]): Promise<Printed> {
  const { code, stdout, stderr } = await meshnet("--model-id", model, "--nodes", nodes, "--json", ...words);
  expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
  return JSON.parse(stdout) as Printed;
}

const spans = ({ shares }: MeshSplit) => shares.map(({ machine, start, end }) => [machine, start, end]);

describe("meshnet plan", () => {
  test("splits a model of GPT-3's shape over five machines, and its sums are those of the shapes", async () => {
    const { split, hopBytes, commands } = await planned(
      LARGE,
      "80GiB,80GiB,80GiB,80GiB,80GiB@2TB/s",
      "--link-speed",
      "10Gbit/s",
    );
    const { shares, secondsPerToken, tokensPerSecond } = split!;
    let at = 0;
    let seconds = 0;
    for (const { machine, start, end, needBytes, readBytes, ...share } of shares) {
      expect(start).toBe(at);
      at = end;
      // Four matrices of 12 D² in all, bfloat16; norms and biases, 13 D, float32.
      const layer = 12 * 12288 ** 2 * 2 + 13 * 12288 * 4;
      const tail = end === 96 ? 50257 * 12288 * 2 + 2 * 12288 * 4 : 0;
      expect(readBytes).toBe((end - start) * layer + tail);
      // Keys and values of 4 sequences of 1024 tokens, bfloat16, in each layer; the embeddings in the head.
      const cache = (end - start) * 2 * 4 * 1024 * 12288 * 2;
      const head = start === 0 ? (50257 + 1024) * 12288 * 2 : 0;
      expect(needBytes).toBeWithin(readBytes + cache + head, 80 * GIB + 1);
      expect(needBytes - (readBytes + cache + head)).toBeLessThan(2.5 * GIB); // activations, driver and reserve
      expect(share.readSeconds).toBeCloseTo(readBytes / (machine === 4 ? 2e12 : 1e11), 9);
      expect(share.hopSeconds).toBeCloseTo(start === 0 ? 0 : 0.0005 + hopBytes / 1.25e9, 9);
      seconds += share.readSeconds + share.passSeconds + share.hopSeconds;
    }
    expect(at).toBe(96);
    expect(secondsPerToken).toBeCloseTo(seconds, 9);
    expect(tokensPerSecond).toBeCloseTo(1 / seconds, 9);
    // The fast machine takes as much as it holds: no other range has more layers.
    const sizes = new Map(shares.map(({ machine, start, end }) => [machine, end - start]));
    expect(sizes.get(4)).toBe(Math.max(...sizes.values()));
    expect(commands.map(({ machine }) => machine)).toEqual(shares.map(({ machine }) => machine).toReversed());
  });

  test("says so where fewer machines are faster, with both times", async () => {
    const words = ["--model-id", SMALL, "--nodes", "8GiB@500GB/s,8GiB@500GB/s,8GiB"];
    const { split, onAllMachines } = await planned(SMALL, words[3]!);
    expect(spans(split!)).toEqual([[0, 0, 12]]);
    expect(onAllMachines!.shares).toHaveLength(3);
    const { stdout } = await meshnet(...words);
    const time = (seconds: number) => `${Number((seconds * 1000).toPrecision(3))} ms`;
    expect(stdout).toContain(`without machines 2, 3 it is faster: ${time(split!.secondsPerToken)}`);
    expect(stdout).toContain(`with a layer on all 3 a token takes ${time(onAllMachines!.secondsPerToken)}`);
    const without = await meshnet("--model-id", SMALL, "--nodes", "8GiB");
    expect(without.stdout).not.toContain("fewer");
  });

  test("shows the sum by which it comes to its prediction", async () => {
    const { wholeBytes } = await planned(SMALL, "8GiB");
    const nodes = `${wholeBytes - 1}B@50GB/s,${wholeBytes - 1}B@100GB/s`;
    const { stdout } = await meshnet("--model-id", SMALL, "--nodes", nodes, "--round-trip", "3");
    const [, sum, total, rate] = /^a token +([\d. +]+) = ([\d.]+) ms: ([\d.]+) tokens\/s$/m.exec(stdout)!;
    const added = sum!.split(" + ").reduce((a, b) => a + Number(b), 0);
    expect(added / Number(total)).toBeWithin(0.98, 1.02);
    expect((Number(rate) * Number(total)) / 1000).toBeWithin(0.98, 1.02);
    expect(sum!.split(" + ")).toHaveLength(5); // two reads, two passes, one hop
    expect(stdout).toMatch(/\d MB ÷ 100 GB\/s +=/);
    expect(stdout).toContain("Σ machines");
  });

  test("names the machines as they were named, and gives several on one host a port each", async () => {
    const { wholeBytes } = await planned(SMALL, "8GiB");
    const size = `${wholeBytes - 1}B`;
    const named = await planned(
      SMALL,
      `gpu-box=${size},192.168.1.20=${size},192.168.1.20=${size}`,
      "--max-context",
      "1000",
    );
    const commands = named.commands.map(({ command }) => command);
    for (const command of commands) expect(command).toContain("--max-context 1000");
    const ports = commands.flatMap((command) => / --port (\d+)/.exec(command)?.slice(1) ?? []);
    const hosts = commands.flatMap((command) => / --host (\S+)/.exec(command)?.slice(1) ?? []);
    expect(new Set(hosts.map((host, i) => `${host}:${ports[i]}`)).size).toBe(hosts.length);
    expect(commands.at(-1)).toContain(`--next http://${hosts[0] === "0.0.0.0" ? "gpu-box" : hosts[0]}:${ports[0]}`);
    for (const command of commands) if (command.includes("0.0.0.0")) expect(command).toContain("--allow-host gpu-box");
  });
});

describe("a machine given to meshnet plan", () => {
  test.each([
    ["10.0.0.1:8000", "--host 10.0.0.1 --port 8000", "http://10.0.0.1:8000"],
    ["cafe:8000", "--host 0.0.0.0 --allow-host cafe --port 8000", "http://cafe:8000"],
    ["gpu-box", "--host 0.0.0.0 --allow-host gpu-box --port 8000", "http://gpu-box:8000"],
    ["fd00::1", "--host fd00::1 --port 8000", "http://[fd00::1]:8000"],
    ["[fd00::1]", "--host fd00::1 --port 8000", "http://[fd00::1]:8000"],
    ["[fd00::1]:9001", "--host fd00::1 --port 9001", "http://[fd00::1]:9001"],
    ["localhost:8000", "--host 127.0.0.1 --port 8000", "http://localhost:8000"],
    ["LocalHost", "--host 127.0.0.1 --port 8000", "http://LocalHost:8000"],
    ["gpu.localhost", "--host 127.0.0.1 --allow-host gpu.localhost --port 8000", "http://gpu.localhost:8000"],
  ])("as %s has that place in the commands", async (host, flags, url) => {
    const { wholeBytes } = await planned(SMALL, "8GiB");
    // The first has the head: the other one is called.
    const { commands, split } = await planned(SMALL, `first=${wholeBytes - 1}B,${host}=${wholeBytes - 1}B`);
    const place = split!.shares[1]!.machine === 1 ? [flags, url] : [];
    if (place.length === 0) expect(commands.at(-1)!.command).toContain(flags);
    else {
      expect(commands[0]!.command).toEndWith(flags);
      expect(commands[1]!.command).toEndWith(` --next ${url}`);
    }
  });

  test("with a port keeps it, and others on that host get free ones", async () => {
    const { wholeBytes } = await planned(SMALL, "8GiB");
    const size = `${Math.ceil(wholeBytes * 0.55)}B`;
    const { commands } = await planned(SMALL, `a=${size},A:8000=${size},a:9001=${size},a=${size}`);
    const ports = commands.map(({ command }) => / --port (\d+)/.exec(command)![1]);
    expect(new Set(ports).size).toBe(ports.length);
  });

  test("as localhost shares its ports with 127.0.0.1", async () => {
    const { wholeBytes } = await planned(SMALL, "8GiB");
    const size = `${wholeBytes - 1}B`;
    const { commands } = await planned(SMALL, `localhost=${size},127.0.0.1=${size}`);
    const places = commands.map(({ command }) => / --host (\S+) --port (\d+)/.exec(command)!.slice(1).join(":"));
    expect(places.toSorted()).toEqual(["127.0.0.1:8000", "127.0.0.1:8001"]);
  });

  test("by its memory alone is taken for one with a GPU, and the plan says so with what a CPU's driver takes more", async () => {
    const { stdout } = await meshnet("--model-id", TINY, "--nodes", "512MiB");
    const { softwareExtraBytes } = await planned(TINY, "512MiB");
    expect(softwareExtraBytes).toBe(64 * 2 ** 20);
    expect(stdout).toMatch(/that machine 1 has a GPU: a driver that computes on the CPU takes 64\.0 MiB more/);
  });

  test("is one of more than the model has layers: the plan says that, and not that it does not fit", async () => {
    const { stdout } = await meshnet("--model-id", SMALL, "--nodes", Array(14).fill("8GiB").join(","));
    expect(stdout).toContain("the model has 12 layers, and there are 14 machines");
    expect(stdout).not.toContain("does not fit");
  });
});

describe("where a model fits in no way, meshnet plan", () => {
  /** The changes, as flags and as a machine more. */
  const withWay = (nodes: string, { quantization, maxSessions, maxContext, machineBytes }: WayOut): string[] => [
    machineBytes ? `${nodes},${machineBytes}B` : nodes,
    ...(quantization ? ["--quantization", quantization] : []),
    ...(maxSessions ? ["--max-sessions", `${maxSessions}`] : []),
    ...(maxContext ? ["--max-context", `${maxContext}`] : []),
  ];
  /** A little less of a change than that, in its last part. */
  const lessThan = (way: WayOut): WayOut | undefined => {
    const { quantization, maxSessions, maxContext, machineBytes } = way;
    if (machineBytes) return { ...way, machineBytes: machineBytes * 0.8 };
    if (maxContext) return { ...way, maxContext: Math.min(1023, maxContext + 16) };
    if (maxSessions) return { ...way, maxSessions: maxSessions + 1 };
    return quantization === "nf4" ? { quantization: "int8" } : undefined;
  };

  test.each([
    ["96 layers of 12288", "80GiB,80GiB,80GiB,80GiB,30GiB", LARGE],
    ["12 layers of 768", "250MiB", SMALL],
    ["12 layers of 768", "300MiB", SMALL],
    ["12 layers of 768", "230MiB,210MiB", SMALL],
    ["12 layers of 768", "480MiB", SMALL],
  ])(
    "exits with 3 and names changes of which each is just enough: %s on %s",
    async (_, nodes, model) => {
      const { code, stdout, stderr } = await meshnet("--model-id", model, "--nodes", nodes, "--json");
      expect(code).toBe(3);
      expect(stderr).toMatch(/needs [\d.]+ [GM]iB in one piece[^]*no split fits\n {2}any one of these would fit:/);
      const { split, waysOut, commands } = JSON.parse(stdout) as Printed;
      expect([split, commands]).toEqual([null, []]);
      expect(waysOut.some(({ machineBytes }) => machineBytes)).toBe(true);
      for (const way of waysOut) {
        expect((await meshnet("--model-id", model, "--nodes", ...withWay(nodes, way))).code).toBe(0);
        const less = lessThan(way);
        if (less) expect((await meshnet("--model-id", model, "--nodes", ...withWay(nodes, less))).code).toBe(3);
      }
      expect((await meshnet("--model-id", model, "--nodes", nodes)).stdout).toBe("");
    },
    60_000,
  );

  test("names each kind of change where it is enough", async () => {
    const kinds = async (nodes: string) => {
      const { stdout } = await meshnet("--model-id", SMALL, "--nodes", nodes, "--json");
      return (JSON.parse(stdout) as Printed).waysOut.map((way) => Object.keys(way).join("+"));
    };
    const { wholeBytes } = await planned(SMALL, "8GiB");
    expect(await kinds(`${wholeBytes - 1}B`)).toEqual(["quantization", "maxSessions", "maxContext", "machineBytes"]);
    // Where no single change is enough:
    const further = ["machineBytes", "quantization+machineBytes"];
    expect(await kinds("300MiB")).toEqual(["quantization+maxSessions", "quantization+maxContext", ...further]);
    expect(await kinds("250MiB")).toEqual(["quantization+maxSessions+maxContext", ...further]);
    expect(await kinds("60MiB")).toEqual(further);
  });
});

describe("where no node could be the head, meshnet plan", () => {
  test("warns with what is missing and what to do, as a dry run of that head refuses it", async () => {
    const { code, stdout, stderr } = await meshnet("--model-id", SMALL, "--nodes", "8GiB");
    expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
    expect(stdout).toMatch(
      /^warning +the head cannot start: .*neither tokenizer\.json nor vocab\.json\n +put .*tokenizer/m,
    );
    const { headProblem } = await planned(SMALL, "8GiB");
    expect(headProblem).toEqual({
      problem: expect.stringContaining(`${SMALL} has neither tokenizer.json nor vocab.json`),
      hint: expect.stringContaining("tokenizer.json"),
    });
  });

  test("and only there", async () => {
    expect((await meshnet("--model-id", TINY, "--nodes", "8GiB")).stdout).not.toContain("warning");
    expect((await planned(TINY, "8GiB")).headProblem).toBeNull();
  });
});

test("meshnet plan does not propose a smaller encoding beside a machine that is as large without it", async () => {
  const { stdout } = await meshnet("--model-id", TINY, "--nodes", "60MiB", "--json");
  const { waysOut } = JSON.parse(stdout) as Printed;
  expect(waysOut.filter(({ machineBytes }) => machineBytes)).toHaveLength(1);
});

describe("meshnet plan refuses with 2", () => {
  test.each([
    [[], /plan needs machines[^]*--nodes[^]*--peers/],
    [["--nodes", "8"], /--nodes 8 has no unit[^]*8GiB/],
    [["--nodes", "8GiBs"], /--nodes 8GiBs is not a size[^]*8GiB/],
    [["--nodes", "0GiB"], /--nodes 0GiB is not a size/],
    [["--nodes", "0"], /--nodes 0 is not a size/],
    [["--nodes", "a="], /--nodes a= has no size/],
    [["--nodes", "8GiB@"], /--nodes "" is not a speed/],
    [["--nodes", "10G"], /10G is not a size: G is none of its units[^]*10GB or 10GiB[^]*kB, MB, GB[^]*KiB, MiB, GiB/],
    [["--nodes", "20EiB"], /20EiB is not a size: EiB is none[^]*KiB, MiB, GiB, TiB, PiB/],
    [["--nodes", "9PiB"], /9PiB is not a size: the largest/],
    [["--nodes", "8GiB@fast"], /--nodes fast is not a speed[^]*900GB\/s/],
    [["--nodes", "8GiB@1GB/s@2GB/s"], /two speeds/],
    [["--nodes", "http://x=8GiB"], /--nodes http:\/\/x/],
    ...["10.0.0.999", "-x", "x-", "a..b", "1.2.3", "0x10", "a b", "", ".", "a/b", "u@h", "[::g]", "fe80::1%eth0"].map(
      (host): [string[], RegExp] => [["--nodes", `${host}=8GiB`], /is no host|is no address/],
    ),
    [["--nodes", "0.0.0.0=8GiB"], /0\.0\.0\.0 is every address/],
    [["--nodes", "[::]:8000=8GiB"], /:: is every address/],
    [["--nodes", "a:0=8GiB"], /"0" is no port/],
    [["--nodes", "a:65536=8GiB"], /"65536" is no port/],
    [["--nodes", "a:b=8GiB"], /"b" is no port/],
    [["--nodes", "a:9000=8GiB,A:9000=8GiB"], /a:9000 is given twice/],
    [["--nodes", "localhost:9000=8GiB,127.0.0.1:9000=8GiB"], /localhost:9000 and 127\.0\.0\.1:9000 are one place/],
    [["--peers", "http://127.0.0.1:9,http://127.0.0.1:9/"], /127\.0\.0\.1:9 is given twice/],
    [["--peers", "http://a:9000", "--nodes", "a:9000=8GiB"], /a:9000 is given twice/],
    [["--nodes", "8GiB", "--round-trip", "soon"], /--round-trip soon/],
    [["--nodes", "8GiB", "--link-speed", "1"], /--link-speed 1 is not a speed/],
    [["--nodes", "8GiB", "--max-context", "257"], /257.*256/],
    [["--peers", "localhost"], /"localhost" is not a node's URL/],
  ])("%j", async (words, says) => {
    const { code, stdout, stderr } = await meshnet("--model-id", TINY, ...words);
    expect({ code, stdout }).toEqual({ code: 2, stdout: "" });
    expect(stderr).toMatch(says);
  });
});
