import { afterEach, describe, expect, test } from "bun:test";
import type { UserError } from "../../src/base/errors.ts";
import { createLogger } from "../../src/base/log.ts";
import { type RunningNode, startNode } from "../../src/server/node.ts";
import { softwareDevices } from "../support/device.ts";
import { TINY } from "../support/oracle.ts";
import { errorOf, postJson, until } from "./tiny-node.ts";

const [lavapipe] = softwareDevices;

const running: RunningNode[] = [];
afterEach(async () => {
  for (const node of running.splice(0).toReversed()) await node.stop();
});

interface Watched extends RunningNode {
  readonly lines: string[];
}

/** A node as `meshnet node` starts it, in this process. */
async function start(options: { shardStart?: number; shardEnd?: number; next?: string } = {}): Promise<Watched> {
  const lines: string[] = [];
  const log = createLogger({ level: "info", format: "text", write: (line) => lines.push(line) });
  const node = await startNode(
    {
      modelId: TINY,
      shardStart: 0,
      host: "127.0.0.1",
      port: 0,
      allowedHosts: [],
      allowedOrigins: [],
      device: lavapipe!.adapter ?? "cpu",
      offline: true,
      ...options,
    },
    { log, env: {} },
  );
  running.push(node);
  return Object.assign(node, { lines });
}

/** As a driver's reset does, the device goes away under the node. */
const lose = ({ device }: RunningNode) => device.gpu.destroy();

const readiness = async ({ url }: RunningNode) => fetch(new URL("health/ready", url));
const isReady = async (node: RunningNode) => (await readiness(node)).ok;

const IDS = [51, 627, 502, 337];
const call = (node: RunningNode, ids: readonly number[], session?: { at: number; step: number }) =>
  postJson(
    node.url,
    { input_ids: [ids] },
    session && {
      "X-Meshnet-Session": "talk",
      "X-Meshnet-Pos-Start": `${session.at}`,
      "X-Meshnet-Step": `${session.step}`,
    },
  );
const tokenOf = async (reply: Response) => ((await reply.json()) as { token_ids: number[] }).token_ids[0];

describe.skipIf(!lavapipe!.adapter)("a node whose device is lost (needs lavapipe)", () => {
  test("says so, opens it anew and is ready again by itself, with the same answers", async () => {
    const node = await start();
    await until(() => isReady(node));
    const before = await tokenOf(await call(node, IDS));
    const first = node.device;
    lose(node);
    await until(() => node.lines.some((line) => line.includes("device lost")));
    const refused = await readiness(node);
    expect([refused.status, refused.headers.get("Retry-After")]).toEqual([503, "1"]);
    expect(await errorOf(refused)).toMatchObject({ code: "device_lost", message: expect.stringContaining("is lost") });
    const refusedCall = await call(node, IDS);
    expect([refusedCall.status, (await errorOf(refusedCall)).code]).toEqual([503, "device_lost"]);
    expect((await fetch(new URL("health/live", node.url))).ok).toBe(true);

    await until(() => isReady(node));
    expect(node.device).not.toBe(first);
    expect(await tokenOf(await call(node, IDS))).toBe(before);
    expect(node.lines.filter((line) => /device is back/.test(line))).toHaveLength(1);
  }, 60_000);

  test("ends what runs with device_lost, and tells its sessions that they are lost: sent again, they go on", async () => {
    const node = await start();
    await until(() => isReady(node));
    const first = await tokenOf(await call(node, IDS, { at: 0, step: 1 }));
    const long = Array.from({ length: 250 }, (_, i) => i % 200);
    const runs = call(node, long);
    await Bun.sleep(2);
    lose(node);
    const ended = await runs;
    expect([ended.status, (await errorOf(ended)).code]).toEqual([503, "device_lost"]);
    await until(() => isReady(node));

    const lost = await call(node, [first!], { at: IDS.length, step: 2 });
    expect(lost.status).toBe(409);
    expect(await errorOf(lost)).toMatchObject({ code: "session_lost", cache_len: 0 });
    const again = await call(node, [...IDS, first!], { at: 0, step: 3 });
    expect(await tokenOf(again)).toBe(await tokenOf(await call(node, [...IDS, first!])));
  }, 60_000);

  test("makes the nodes before it not ready, and they are ready again with it", async () => {
    const tail = await start({ shardStart: 2 });
    const head = await start({ shardEnd: 2, next: tail.url });
    await until(() => isReady(head));
    const before = await tokenOf(await call(head, IDS));
    lose(tail);
    const refused = await call(head, IDS);
    expect(refused.status).toBe(503);
    expect(await errorOf(refused)).toMatchObject({ code: "device_lost", layers: "2-4" });
    await until(async () => !(await isReady(head)));
    await until(() => isReady(head));
    expect(await tokenOf(await call(head, IDS))).toBe(before);
    expect(head.lines.some((line) => line.includes("device lost"))).toBe(false);
  }, 60_000);

  test("that is lost again and again gives up, and says what to look at", async () => {
    const node = await start();
    let losses = 0;
    const failure = node.failure.catch((error: UserError) => error);
    const ended = Promise.race([failure, Bun.sleep(50_000)]);
    let isOver = false;
    void ended.then(() => (isOver = true));
    while (!isOver) {
      const before = node.device;
      lose(node);
      losses++;
      await until(() => isOver || node.device !== before);
    }
    const error = (await ended) as UserError;
    expect(error).toMatchObject({ code: "device_lost", hint: expect.stringContaining("driver's log") });
    expect(error.message).toContain("was lost 5 times within 60 s");
    expect(losses).toBe(5);
    expect(await isReady(node)).toBe(false);
  }, 60_000);
});
