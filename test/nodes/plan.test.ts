import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { formatBytes, sizeFlag } from "../../src/base/bytes.ts";
import type { MeshCommand } from "../../src/cli/mesh-commands.ts";
import type { MeshPlan } from "../../src/server/plan-mesh.ts";
import { NodeProcess, run, startChain } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";

const { greedy } = JSON.parse(readFileSync(join(TINY, "oracle.json"), "utf8"));
const PROMPT: string = greedy.prompts.free;
const TEXT: string = PROMPT + greedy.continuations["free.fp32"];

type Printed = MeshPlan & { readonly commands: readonly MeshCommand[] };

async function planned(...words: string[]): Promise<Printed> {
  const { code, stdout, stderr } = await run(["plan", "--model-id", TINY, "--json", ...words]);
  expect({ code, stderr }).toEqual({ code: 0, stderr: "" });
  return JSON.parse(stdout) as Printed;
}

function freePort(): number {
  const server = Bun.listen({ hostname: "127.0.0.1", port: 0, socket: { data() {} } });
  server.stop(true);
  return server.port;
}

test("the commands that meshnet plan prints start a chain that writes transformers' text", async () => {
  const context = ["--max-context", "200"];
  const { wholeBytes } = await planned("--nodes", "8GiB", ...context);
  const size = `${wholeBytes - 1}B`; // neither holds the whole
  const { split, commands } = await planned("--nodes", `${size},${size}`, ...context);
  expect(split!.shares).toHaveLength(2);
  const ports = [freePort(), freePort()];
  // What a person does: an address for each HOST. Two on one machine also need two ports.
  const own = commands.map(({ command }) => command.replaceAll(/HOST\d+/g, "127.0.0.1"));
  const [tail, head] = own.map((command) =>
    command.replace(" --next http://127.0.0.1:8000", " --next NEXT").split(" "),
  );
  const flags = (words: string[], port: number) =>
    [...words.slice(2), ...(words.includes("--port") ? [] : ["--port", "8000"])].map((word) =>
      word === "8000" ? `${port}` : word === "NEXT" ? `http://127.0.0.1:${ports[0]}` : word,
    );
  expect([tail!.slice(0, 2), head!.slice(0, 2)]).toEqual([
    ["meshnet", "node"],
    ["meshnet", "node"],
  ]);
  await using second = new NodeProcess(flags(tail!, ports[0]!));
  await using first = new NodeProcess(flags(head!, ports[1]!));
  const url = await first.ready();
  const { stdout } = await run(["generate", PROMPT, "--head", url, "--max-new-tokens", "24"]);
  expect(stdout.length).toBeGreaterThan(PROMPT.length + 20);
  expect(TEXT).toStartWith(stdout.trimEnd());
  const info = async (node: string) => (await (await fetch(`${node}info`)).json()) as object;
  expect(await info(url)).toMatchObject({ start: 0, end: split!.shares[0]!.end, max_context: 200 });
  expect(await info(await second.url)).toMatchObject({ start: split!.shares[1]!.start, end: 4 });
}, 120_000);

test("meshnet plan --peers asks running nodes for their memory, and measures them and the way there", async () => {
  await using chain = await startChain(TINY, [1, 4]);
  const urls = await Promise.all(chain.nodes.map((node) => node.url));
  const { machines, split, commands } = await planned("--peers", urls.join(","));
  for (const [i, machine] of machines.entries()) {
    expect(machine).toMatchObject({ url: urls[i]!, host: "127.0.0.1", problems: [] });
    expect(machine).toMatchObject({ memorySource: "measured", speedSource: "measured", linkSource: "measured" });
    expect(machine.memoryBytes).toBeGreaterThan(100 * 2 ** 20);
    expect(machine.bytesPerSecond).toBeWithin(1e5, 1e12);
    expect(machine.roundTripSeconds).toBeWithin(1e-6, 1);
  }
  expect(split!.shares).toHaveLength(1); // a hop saves nothing here
  const { port } = new URL(urls[split!.shares[0]!.machine]!);
  expect(commands).toHaveLength(1);
  expect(commands[0]!.command).toEndWith(`--shard-start 0 --shard-end 4 --host 127.0.0.1 --port ${port}`);

  // What is said of a machine is not asked.
  const { needBytes } = split!.shares[0]!; // with what this driver takes
  const told = await planned("--peers", urls.map((url) => `${url}=${needBytes - 1}B@1GB/s`).join(","));
  expect(told.machines).toMatchObject([
    { memorySource: "given", speedSource: "given", bytesPerSecond: 1e9, linkSource: "measured" },
    { memorySource: "given", speedSource: "given", bytesPerSecond: 1e9, linkSource: "measured" },
  ]);
  expect(told.split!.shares).toHaveLength(2);
  const [tail, head] = told.commands;
  const nextUrl = urls[tail!.machine]!.replace(/\/$/, "");
  expect(head!.command).toEndWith(` --next ${nextUrl}`);
}, 120_000);

test("meshnet plan --peers counts a node's --memory-limit as that node does, and repeats it", async () => {
  const { wholeOwnBytes, wholeOnBytes } = await planned("--nodes", "8GiB");
  const nodeWith = (limit: number) =>
    new NodeProcess(["--model-id", TINY, "--shard-start", "2", "--port", "0", "--memory-limit", `${limit}`]);
  {
    await using node = nodeWith(wholeOwnBytes);
    const url = await node.ready();
    const { machines, split, commands } = await planned("--peers", url);
    expect(machines).toMatchObject([{ limitBytes: wholeOwnBytes }]);
    expect(machines[0]!.memoryBytes).toBeGreaterThan(wholeOnBytes[0]!);
    expect(split!.shares).toMatchObject([{ start: 0, end: 4, ownBytes: wholeOwnBytes }]);
    expect(commands[0]!.command).toContain(` --memory-limit ${sizeFlag(wholeOwnBytes)} `);
    // The node itself is of the same mind.
    const { port } = new URL(url);
    await node.stop();
    const words = commands[0]!.command.split(" ").slice(2);
    await using again = new NodeProcess(words);
    expect(new URL(await again.ready()).port).toBe(port);
  }
  await using node = nodeWith(wholeOwnBytes - 1);
  const { code, stderr } = await run(["plan", "--model-id", TINY, "--peers", await node.ready()]);
  expect(code).toBe(3);
  expect(stderr).toMatch(/MiB of it count for --memory-limit\)[^]*--memory-limit [\d.]+ MiB: no split fits/);
}, 120_000);

test("meshnet plan tells what the model takes on these machines, not on others", async () => {
  await using node = new NodeProcess(["--model-id", TINY, "--port", "0"]);
  const url = await node.ready();
  const { wholeOnBytes } = await planned("--peers", `${url}=8GiB`);
  const { code, stdout, stderr } = await run([
    "plan",
    "--model-id",
    TINY,
    "--json",
    "--peers",
    `${url}=${Math.floor(wholeOnBytes[0]! / 2)}B`,
  ]);
  expect(code).toBe(3);
  expect((JSON.parse(stdout) as Printed).wholeOnBytes).toEqual([...wholeOnBytes]);
  expect(stderr).toContain(`needs ${formatBytes(wholeOnBytes[0]!)} in one piece`);
}, 120_000);

test("meshnet plan --peers says which node cannot be reached", async () => {
  const { code, stderr } = await run(["plan", "--model-id", TINY, "--peers", "http://127.0.0.1:9"]);
  expect(code).toBe(1);
  expect(stderr).toContain("http://127.0.0.1:9/ cannot be reached: nothing listens there");
});
