import { afterAll, describe, expect, test } from "bun:test";
import { chmodSync, mkdirSync, readdirSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { claimMemory, claims, turnFile } from "../../src/gpu/claims.ts";
import { temporaryFolder } from "../support/safetensors.ts";

const MIB = 2 ** 20;
const folder = temporaryFolder();
afterAll(() => folder[Symbol.dispose]());

/** A process that claims, takes memory at each line that it is sent, and says when it has. */
function claimant(at: string, claimMiB: number, takeMiB: number) {
  const program = `
    import { claimMemory } from ${JSON.stringify(join(import.meta.dir, "../../src/gpu/claims.ts"))};
    claimMemory(${claimMiB * MIB}, ${JSON.stringify(at)});
    console.log("ready");
    const taken = [];
    for await (const _ of console) {
      taken.push(Buffer.alloc(${takeMiB * MIB}, taken.length + 1));
      console.log("taken");
    }`;
  const child = Bun.spawn([process.execPath, "-e", program], { stdio: ["pipe", "pipe", "inherit"] });
  const said = child.stdout.getReader();
  return {
    child,
    ready: () => said.read(),
    take: () => {
      child.stdin.write("\n");
      child.stdin.flush();
      return said.read();
    },
  };
}

describe.skipIf(process.platform !== "linux")("claims of memory", () => {
  test("are what a process was promised and has not taken, as long as it lives", async () => {
    const at = join(folder.path, "one");
    const { child, ready, take } = claimant(at, 1000, 300);
    await ready();
    const outstanding = () => claims(at).map(({ outstandingBytes }) => outstandingBytes / MIB);
    expect(outstanding()[0]).toBeWithin(950, 1001); // the process itself grows a little
    expect(claims(at)[0]!.cgroup).toContain(":/");
    await take();
    expect(outstanding()[0]).toBeWithin(600, 701);
    for (let times = 0; times < 3; times++) await take();
    expect(outstanding()).toEqual([0]);
    child.kill("SIGKILL");
    await child.exited;
    expect(outstanding()).toEqual([]);
    expect(readdirSync(at)).toEqual([`${child.pid}.claim`]);
    using _ = claimMemory(MIB, at); // the next one cleans up
    expect(readdirSync(at)).toEqual([`${process.pid}.claim`]);
  });

  test("go with a process that ends by itself", async () => {
    const at = join(folder.path, "two");
    const { child, ready } = claimant(at, 1000, 1);
    await ready();
    expect(claims(at)).toHaveLength(1);
    child.stdin.end();
    expect(await child.exited).toBe(0);
    expect(readdirSync(at)).toEqual([]);
  });

  test("of this process do not count, are replaced, and can be given back", () => {
    const at = join(folder.path, "three");
    const claim = claimMemory(5, at);
    claimMemory(7, at);
    expect(claims(at)).toEqual([]);
    expect(readdirSync(at)).toHaveLength(1);
    claim[Symbol.dispose]();
    expect(readdirSync(at)).toEqual([]);
  });

  test("that are nonsense, or of a process that had the number before, are none", () => {
    const at = join(folder.path, "four");
    mkdirSync(at, { mode: 0o700 });
    writeFileSync(join(at, "1.claim"), JSON.stringify({ bytes: 1e9, heldBytes: 0, startTime: "another" }));
    writeFileSync(join(at, `${process.ppid}.claim`), '{"bytes":');
    writeFileSync(join(at, "turn.lock"), "");
    expect(claims(at)).toEqual([]);
  });

  test("cannot be where there is no folder of this user alone, which is no error", () => {
    const target = join(folder.path, "target");
    mkdirSync(target);
    const places = { file: "file", below: "file/below", link: "link", others: "others" };
    writeFileSync(join(folder.path, places.file), "");
    symlinkSync(target, join(folder.path, places.link));
    mkdirSync(join(folder.path, places.others));
    chmodSync(join(folder.path, places.others), 0o777);
    for (const place of Object.values(places)) {
      const at = join(folder.path, place);
      claimMemory(5, at)[Symbol.dispose]();
      expect(turnFile(at)).toBeUndefined();
      expect(claims(at)).toEqual([]);
    }
    for (const place of [target, join(folder.path, places.others)]) expect(readdirSync(place)).toEqual([]);
  });
});
