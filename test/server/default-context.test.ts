import { expect, test } from "bun:test";
import { join } from "node:path";
import { silentLogger } from "../../src/base/log.ts";
import { type NodeConfig, planNode } from "../../src/server/plan-node.ts";
import { FIXTURES } from "../support/oracle.ts";
import { temporaryFolder } from "../support/safetensors.ts";

async function contextOf(fixture: string, maxContext?: number): Promise<number> {
  using folder = temporaryFolder();
  const config: NodeConfig = {
    modelId: join(FIXTURES, "families", fixture),
    shardStart: 1,
    maxContext,
    device: "auto",
    host: "127.0.0.1",
    port: 0,
    allowedHosts: [],
    allowedOrigins: [],
    offline: true,
  };
  const { load } = await planNode(config, { log: silentLogger, env: { HOME: folder.path } });
  return load.options.maxContext;
}

test("a node takes what its model was trained for: its positions, 8192 of them where it has more", async () => {
  expect(await contextOf("mistral")).toBe(64);
  expect(await contextOf("gemma3-pictures")).toBe(8192); // of 131,072
});

test("where longrope would turn to its long factors, a node stops unless it is told to go on", async () => {
  expect(await contextOf("phi3")).toBe(16);
  expect(await contextOf("phi3", 17)).toBe(17);
  expect(await contextOf("phi3", 64)).toBe(64);
  await expect(contextOf("phi3", 65)).rejects.toThrow(/65.*64/);
});

test("a rope that stretches with the sequence lets it grow beyond the model's own positions", async () => {
  expect(await contextOf("llama-dynamic")).toBe(64); // 16 positions, a factor of 4
});
