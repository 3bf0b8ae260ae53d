import { silentLogger } from "../../base/log.ts";
import { formatSpan } from "../../base/span.ts";
import { openStage } from "../../engine/open-stage.ts";
import type { GpuStage } from "../../engine/stage.ts";
import type { StageInput, Want } from "../../engine/types.ts";
import type { Device } from "../../gpu/device.ts";
import type { LoadPlan } from "../../weights/plan.ts";
import { type NodeConfig, type NodePlan, planNode, type Surroundings } from "../plan-node.ts";
import { type EncodingName, flagsOf } from "./encodings.ts";

/** Plans spans of one model in one encoding after another, from what is on this machine. */
export class Planner {
  constructor(
    private readonly node: NodeConfig,
    private readonly surroundings: Surroundings,
  ) {}

  async plan(encoding: EncodingName, shardStart: number, shardEnd: number): Promise<NodePlan & Disposable> {
    const plan = await planNode(
      { ...this.node, ...flagsOf(encoding), shardStart, shardEnd, maxSessions: 1, offline: true },
      { ...this.surroundings, log: silentLogger },
    );
    return { ...plan, [Symbol.dispose]: () => plan.snapshot[Symbol.dispose]() };
  }
}

/** Stages of one model on one device, one at a time. */
export class Stages {
  constructor(
    readonly device: Device,
    private readonly planner: Planner,
    private readonly log: Surroundings["log"],
  ) {}

  /** The memory of a stage is given back before the next one asks for it. */
  async use<T>(
    encoding: EncodingName,
    [start, end]: readonly [number, number],
    run: (stage: GpuStage, load: LoadPlan) => Promise<T>,
  ): Promise<T> {
    using plan = await this.planner.plan(encoding, start, end);
    const { span } = plan.load.options;
    this.log.info("running", { encoding, layers: `${formatSpan(span)} of ${span.total}` });
    const stage = await openStage({ ...plan, plan: plan.load, device: this.device });
    try {
      return await run(stage, plan.load);
    } finally {
      stage.destroy();
      await this.device.reclaim();
    }
  }
}

export const idsInput = (ids: Int32Array): StageInput => ({
  kind: "ids",
  rows: [{ tokens: ids.length, positionStart: 0 }],
  ids,
});

/** The bfloat16 bits that a stage gives for each sequence by itself. */
export async function forwardAll(stage: GpuStage, inputs: readonly StageInput[], want: Want): Promise<Uint16Array[]> {
  const outputs: Uint16Array[] = [];
  for (const input of inputs) {
    const output = await stage.forward(input, want);
    if (!("values" in output)) throw new Error(`a stage gave ${output.kind} for ${want}`);
    outputs.push(output.values);
  }
  return outputs;
}

/** Where the bits of two runs differ first; undefined where they do not. */
export function firstDifference(
  expected: readonly Uint16Array[],
  values: readonly Uint16Array[],
): { readonly sequence: number; readonly element: number } | undefined {
  for (const [sequence, bits] of expected.entries()) {
    const other = values[sequence]!;
    const element = bits.findIndex((value, index) => value !== other[index]);
    if (element >= 0) return { sequence, element };
  }
  return undefined;
}
