// A process of its own that loads a checkpoint whose file changes in the middle:
// `bun load-while-changed.ts DIRECTORY DEVICE truncate|unlink`. It prints what came of it.
import { readFileSync, rmSync, truncateSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../src/base/errors.ts";
import { silentLogger } from "../../src/base/log.ts";
import { openStage } from "../../src/engine/open-stage.ts";
import { openDevice } from "../../src/gpu/device.ts";
import { readModel } from "../../src/models/index.ts";
import { openCheckpoint } from "../../src/safetensors/checkpoint.ts";
import { planLoad } from "../../src/weights/plan.ts";
import { TINY } from "./oracle.ts";
import { bits, idsInput, openFixture } from "./stages.ts";

export interface ChangedLoad {
  /** The tensor in whose middle the file ends, and where that is. */
  tensor: string;
  cutAt: number;
  fullSize: number;
  /** How the load ended. */
  error: { isUserError: boolean; code?: string; message: string } | undefined;
  /** The logits that the process computes afterwards, from another model. */
  logitsAfterwards: number;
}

if (import.meta.main) await main();

async function main(): Promise<void> {
  const [directory, select, change] = process.argv.slice(2) as [string, string, "truncate" | "unlink"];
  const { family, config } = readModel(JSON.parse(readFileSync(join(directory, "config.json"), "utf8")));
  const options = {
    span: { start: 0, end: config.layers, total: config.layers },
    maxContext: 64,
    maxSessions: 1,
    encoding: "bf16" as const,
  };
  const plan = planLoad(family, config, options, openCheckpoint(directory));
  const wanted = { bufferBytes: plan.largestBytes, bindingBytes: plan.largestBytes };
  const device = await openDevice({ select, log: silentLogger, wanted });

  const { source } = plan.weights.find(({ source: { name } }) => name === "h.1.mlp.c_fc.weight")!;
  const cutAt = Math.floor((source.begin + source.end) / 2);
  let isChanged = false;
  const onProgress = () => {
    if (isChanged) return;
    isChanged = true;
    if (change === "unlink") rmSync(source.file.path);
    else truncateSync(source.file.path, cutAt);
  };
  let error: ChangedLoad["error"];
  try {
    const stage = await openStage({ device, family, config, plan, eosTokenIds: [], onProgress });
    stage.destroy();
  } catch (thrown) {
    const { message } = thrown as Error;
    error =
      thrown instanceof UserError ? { isUserError: true, code: thrown.code, message } : { isUserError: false, message };
  }
  const tiny = await openFixture(device, TINY);
  const logits = await bits([tiny], idsInput([1, 2, 3]), "logits");
  const result: ChangedLoad = {
    tensor: source.name,
    cutAt,
    fullSize: source.file.size,
    error,
    logitsAfterwards: logits.length,
  };
  console.log(JSON.stringify(result));
  process.exit(0);
}
