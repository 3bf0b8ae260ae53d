import { UserError } from "../base/errors.ts";
import { silentLogger } from "../base/log.ts";
import { isHead } from "../base/span.ts";
import { openDevice } from "../gpu/device.ts";
import { memoryPlan } from "../weights/memory-plan.ts";
import {
  describeFree,
  describeMemory,
  describeShortage,
  fitQuestion,
  type Room,
  roomOf,
  shortageOf,
  waysOut,
} from "./fit.ts";
import { type NodeConfig, type NodePlan, planNode, type Surroundings } from "./plan-node.ts";
import { textProblem } from "./text-problem.ts";

/** What a node would do, and whether it could. */
export interface DryRun {
  readonly plan: NodePlan;
  /** The memory by purpose, with a sum. */
  readonly memory: readonly string[];
  /** "fits: …" or "does not fit: …", with both numbers. */
  readonly verdict: string;
  /** Where it does not fit: the refusal of the node. Its table is in `memory`. */
  readonly refusal: UserError | undefined;
}

/**
 * Plans as a node does and holds the plan against `--memory-limit` and the device, which is opened for it; nothing is taken of
 * the device, and no weights are fetched. Where the machine has no device at all, only the limit counts.
 * @throws UserError `no_device` where `--device` names one that is not there; what `planNode` throws.
 */
export async function dryRun(config: NodeConfig, surroundings: Surroundings): Promise<DryRun> {
  const plan = await planNode({ ...config, wholeFiles: false }, surroundings);
  const room = await deviceRoom(plan, config);
  const question = fitQuestion(plan, room ?? { ...NO_DEVICE, limitBytes: config.memoryLimit });
  const memory = describeMemory(plan.load, room?.adapter);
  const needs = memoryPlan(plan.load, question.room.adapter);
  const shortage = shortageOf(needs, question.room);
  if (!shortage) {
    const problem = isHead(plan.load.options.span) && (await textProblem(plan.snapshot));
    if (problem) throw problem;
    const there = room ? describeFree(room) : "no device was found here: only --memory-limit was looked at";
    return { plan, memory, verdict: `fits: ${there}`, refusal: undefined };
  }
  const problem = describeShortage(question, needs, shortage);
  const refusal = new UserError("does_not_fit", problem, waysOut(question).join("\n    "));
  return { plan, memory, verdict: `does not fit: ${problem}`, refusal };
}

async function deviceRoom(
  { load }: NodePlan,
  { device: select, memoryLimit }: Pick<NodeConfig, "device" | "memoryLimit">,
): Promise<Room | undefined> {
  const wanted = { bufferBytes: load.largestBytes, bindingBytes: load.largestBytes };
  try {
    const device = await openDevice({ select, log: silentLogger, wanted });
    const room = roomOf(device, memoryLimit);
    device.destroy();
    return room;
  } catch (error) {
    if (select === "auto" && error instanceof UserError && error.code === "no_device") return undefined;
    throw error;
  }
}

const NO_DEVICE: Room = {
  adapter: { name: "a device", isSoftware: false },
  memory: { totalBytes: null, availableBytes: null, source: "no device was found", isEstimate: true },
  maxBindingBytes: Infinity,
};
