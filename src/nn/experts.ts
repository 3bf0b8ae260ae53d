import { ceilDiv } from "../base/bytes.ts";
import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf, type Tensor } from "../gpu/tensor.ts";
import {
  ACTIVATIONS,
  type Activation as ActivationName,
  addGated as addGatedKernel,
  combineExperts,
  expertGemm,
  expertGemv,
  expertLanes,
  gatedActivation,
  GEMV_OUTPUTS,
  groupPairs,
  sharingFor,
  TILE_WORDS,
  tilesOf,
  WORKGROUP,
} from "../kernels/index.ts";
import { GEMV_ROWS } from "./linear-spec.ts";
import type { ExpertStack } from "./matrix.ts";
import { type BuildContext, matrixSpec, type ModuleSpec, temporary, type WeightSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";
import { ROUTES } from "./router.ts";

export interface ExpertsSpec {
  /** What sets these experts' stacks apart from others': their place in the checkpoint. */
  name: string;
  /** The checkpoint's names of one expert's matrices, each in order of preference. */
  weights: (expert: number) => { gate: readonly string[]; up: readonly string[]; down: readonly string[] };
  experts: number;
  /** Experts that a token takes. */
  chosen: number;
  hidden: number;
  inner: number;
  activation: ActivationName;
  output: string;
}

const LABELS = { gateUp: "expert_gate_up", inner: "expert_inner", outputs: "expert_outputs" } as const;
const TABLES = { order: "expert_order", tiles: "expert_tiles" } as const;

/**
 * y = Σ weight · down(activation(gate(x)) · up(x)) over the experts that `route` has chosen for each token, in the order
 * of its choice. No other expert's weights are read.
 */
export function experts(spec: ExpertsSpec): ModuleSpec<Experts> {
  const { chosen, hidden, inner } = spec;
  // Of each token one row after another: rows of `chosen` times as many columns, each padded for itself.
  const rows = (label: string, columns: number) => temporary(label, chosen * strideOf(columns, "f32"));
  return {
    weights: Array.from({ length: spec.experts }, (_, expert) => Object.values(matricesOf(spec, expert))).flat(),
    temporaries: [
      rows(LABELS.gateUp, 2 * inner),
      rows(LABELS.inner, inner),
      rows(LABELS.outputs, hidden),
      temporary(TABLES.order, chosen, { type: "u32" }),
      temporary(TABLES.tiles, chosen * TILE_WORDS, { type: "u32" }),
      temporary(spec.output, hidden),
    ],
    async build(context) {
      const stride = strideOf(2 * inner, "f32");
      const { pipelines } = context;
      return new Experts(spec, context.nothing, {
        group: await pipelines.compile(groupPairs, { EXPERTS: spec.experts }),
        gate: await product(spec, "gate", { columns: hidden, share: chosen, stride, outAt: 0 }, context),
        up: await product(spec, "up", { columns: hidden, share: chosen, stride, outAt: inner }, context),
        activate: await pipelines.compile(gatedActivation, {
          COLUMNS: inner,
          STRIDE: stride,
          STRIDE_OUT: strideOf(inner, "f32"),
          ACTIVATION: ACTIVATIONS[spec.activation],
          WORKGROUP,
        }),
        down: await product(
          spec,
          "down",
          { columns: inner, share: 1, stride: strideOf(hidden, "f32"), outAt: 0 },
          context,
        ),
        combine: await pipelines.compile(combineExperts, {
          CHOSEN: chosen,
          STRIDE: strideOf(hidden, "f32"),
          WORKGROUP,
        }),
      });
    },
  };
}

type Part = "gate" | "up" | "down";

const stackOf = ({ name }: ExpertsSpec, part: Part): string => `${name}.${part}`;

function matricesOf(spec: ExpertsSpec, expert: number): Record<Part, WeightSpec> {
  const { experts, chosen, hidden, inner } = spec;
  const names = spec.weights(expert);
  const matrix = (part: Part, rows: number, columns: number) =>
    matrixSpec(names[part], rows, columns, {
      quantizable: true,
      stack: { name: stackOf(spec, part), expert, experts, chosen },
    });
  return {
    gate: matrix("gate", inner, hidden),
    up: matrix("up", inner, hidden),
    down: matrix("down", hidden, inner),
  };
}

type Operands = "first_expert" | "experts" | "outputs" | "first_output";

type Few = Pipeline<"weight" | "scales" | "x" | "choice" | "y", Operands, { pairs: number; outputs: number }>;
type Many = Pipeline<"weight" | "scales" | "x" | "order" | "tiles" | "y", Operands, { tiles: number; outputs: number }>;

/** One of the three products, and its kernels on one device: both give the same bits. */
interface Product {
  readonly stack: ExpertStack;
  /** For up to `fewRows` tokens. */
  readonly few?: Few;
  readonly fewRows: number;
  /** For more: only where there can be more. */
  readonly many?: Many;
}

async function product(
  spec: ExpertsSpec,
  part: Part,
  { columns, share, stride, outAt }: { columns: number; share: number; stride: number; outAt: number },
  { pipelines, weights, device }: BuildContext,
): Promise<Product> {
  const stack = weights.experts(stackOf(spec, part));
  const weightStride = strideOf(columns, "bf16");
  const shape = { WEIGHT_STRIDE: weightStride, COLUMNS: columns, STRIDE_OUT: stride, OUT_AT: outAt, SHARE: share };
  if (device.info.isSoftware) {
    const kernel = expertLanes[sharingFor(device.info.subgroupMinSize)][stack.encoding];
    return { stack, few: await pipelines.compile(kernel, shape), fewRows: Infinity };
  }
  const many = await pipelines.compile(expertGemm[stack.encoding], shape);
  const blocks = { OUTPUTS: GEMV_OUTPUTS, BLOCKS: ceilDiv(weightStride, 32) };
  // The kernel for few keeps a sum for each block of columns: rows can be too long for it.
  const hasRoom = 4 * blocks.OUTPUTS * blocks.BLOCKS <= device.limits.maxComputeWorkgroupStorageSize;
  if (!hasRoom) return { stack, fewRows: 0, many };
  const few = await pipelines.compile(expertGemv[stack.encoding], { ...shape, ...blocks });
  return { stack, few, fewRows: GEMV_ROWS, many };
}

interface Pipelines {
  readonly group: Pipeline<"choice" | "order" | "tiles", "pairs" | "tiles", unknown>;
  readonly gate: Product;
  readonly up: Product;
  readonly activate: Pipeline<"x" | "y", never, { rows: number; columns: number }>;
  readonly down: Product;
  readonly combine: Pipeline<"x" | "weight" | "y", never, { rows: number; columns: number }>;
}

export class Experts {
  constructor(
    private readonly spec: ExpertsSpec,
    private readonly nothing: Tensor,
    private readonly pipelines: Pipelines,
  ) {}

  /** `x`: [tokens, hidden]. `route` has run on the same tokens. */
  forward(pass: Pass, { tensor: x, rows }: Activations): Activations {
    const { commands, temporaries } = pass;
    const { pipelines } = this;
    const pairs = rows * this.spec.chosen;
    const [gateUp, inner, outputs] = Object.values(LABELS).map((label) => temporaries.get(label)) as Tensor[];
    const y = temporaries.get(this.spec.output);
    const weight = temporaries.get(ROUTES.weights);

    const isFew = [pipelines.gate, pipelines.up, pipelines.down].every(({ fewRows }) => rows <= fewRows);
    if (!isFew) this.#group(pass, pairs);
    const multiply = (product: Product, from: Tensor, to: Tensor) =>
      isFew ? this.#few(pass, product, pairs, from, to) : this.#many(pass, product, pairs, from, to);
    multiply(pipelines.gate, x, gateUp!);
    multiply(pipelines.up, x, gateUp!);
    const dims = { rows: pairs, columns: this.spec.inner };
    commands.dispatch(pipelines.activate, { x: gateUp!, y: inner! }, {}, dims);
    multiply(pipelines.down, inner!, outputs!);
    commands.dispatch(pipelines.combine, { x: outputs!, weight, y }, {}, { rows, columns: y.stride });
    return { tensor: y, rows };
  }

  #group({ commands, temporaries }: Pass, pairs: number): void {
    const tables = { order: temporaries.get(TABLES.order), tiles: temporaries.get(TABLES.tiles) };
    const params = { pairs, tiles: tilesOf(pairs, this.spec.experts) };
    commands.dispatch(this.pipelines.group, { choice: temporaries.get(ROUTES.choice), ...tables }, params, {});
  }

  #few({ commands, temporaries }: Pass, { stack, few }: Product, pairs: number, x: Tensor, y: Tensor): void {
    const choice = temporaries.get(ROUTES.choice);
    for (const { tensor, scales = this.nothing, ...place } of stack.parts) {
      const bindings = { weight: tensor, scales, x, choice, y };
      commands.dispatch(few!, bindings, paramsOf(place), { pairs, outputs: place.rows });
    }
  }

  #many({ commands, temporaries }: Pass, { stack, many }: Product, pairs: number, x: Tensor, y: Tensor): void {
    const tables = { order: temporaries.get(TABLES.order), tiles: temporaries.get(TABLES.tiles) };
    const tiles = tilesOf(pairs, this.spec.experts);
    for (const { tensor, scales = this.nothing, ...place } of stack.parts) {
      const bindings = { weight: tensor, scales, x, ...tables, y };
      commands.dispatch(many!, bindings, paramsOf(place), { tiles, outputs: place.rows });
    }
  }
}

const paramsOf = (place: { firstExpert: number; experts: number; firstRow: number; rows: number }) => ({
  first_expert: place.firstExpert,
  experts: place.experts,
  outputs: place.rows,
  first_output: place.firstRow,
});

/** y += sigmoid(gate) · x, in place, with the first column of `gate` for each row. */
export function addGated(spec: { columns: number }): ModuleSpec<AddGated> {
  return {
    weights: [],
    temporaries: [],
    build: async ({ pipelines }) =>
      new AddGated(
        await pipelines.compile(addGatedKernel, {
          STRIDE: strideOf(spec.columns, "f32"),
          GATE_STRIDE: strideOf(1, "f32"),
          WORKGROUP,
        }),
      ),
  };
}

export class AddGated {
  constructor(private readonly pipeline: Pipeline<"x" | "gate" | "y", never, { rows: number; columns: number }>) {}

  forward({ commands }: Pass, y: Activations, x: Activations, gate: Activations): Activations {
    const dims = { rows: y.rows, columns: y.tensor.stride };
    commands.dispatch(this.pipeline, { x: x.tensor, gate: gate.tensor, y: y.tensor }, {}, dims);
    return y;
  }
}
