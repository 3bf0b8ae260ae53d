import { strideOf, type Tensor } from "../gpu/tensor.ts";
import { type Pipeline } from "../gpu/kernel.ts";
import { route as kernel } from "../kernels/index.ts";
import { type ModuleSpec, temporary, vectorSpec } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface RouteSpec {
  experts: number;
  /** Experts that a token takes. */
  chosen: number;
  score: "softmax" | "sigmoid";
  /** Name of what is added to the scores for the choice alone, [experts] in float32. */
  bias?: string;
  /** Experts are in groups of neighbours, of which the best few are chosen from; a group is worth its `best` experts. */
  groups?: { count: number; chosen: number; best: 1 | 2 };
  /** Weights are divided by their sum. */
  normalize: boolean;
  scale: number;
}

/** Where a pass keeps its choice: [tokens, chosen] experts, and what the output of each counts. */
export const ROUTES = { choice: "expert_choice", weights: "expert_weights" } as const;

/** Logits [tokens, experts] to each token's experts and their weights, for the modules behind. */
export function route(spec: RouteSpec): ModuleSpec<Route> {
  const { experts, chosen, groups = { count: 1, chosen: 1, best: 1 } } = spec;
  const bias = spec.bias === undefined ? undefined : vectorSpec(spec.bias, experts, { keepsF32: true });
  return {
    weights: bias ? [bias] : [],
    temporaries: [
      temporary(ROUTES.choice, chosen, { type: "u32" }),
      temporary(ROUTES.weights, chosen, { type: "u32" }), // float32, without the padding that its rows would have
    ],
    build: async ({ pipelines, weights, nothing }) =>
      new Route(
        bias ? weights.vector(bias) : nothing,
        await pipelines.compile(kernel, {
          EXPERTS: experts,
          STRIDE: strideOf(experts, "f32"),
          CHOSEN: chosen,
          SIGMOID: spec.score === "sigmoid" ? 1 : 0,
          HAS_BIAS: bias ? 1 : 0,
          GROUPS: groups.count,
          TOP_GROUPS: groups.chosen,
          GROUP_BEST: groups.best,
          NORMALIZE: spec.normalize ? 1 : 0,
          SCALE: spec.scale,
        }),
      ),
  };
}

export class Route {
  constructor(
    private readonly bias: Tensor,
    private readonly pipeline: Pipeline<"logits" | "bias" | "choice" | "weight", never, { rows: number }>,
  ) {}

  forward({ commands, temporaries }: Pass, { tensor: logits, rows }: Activations): void {
    const choice = temporaries.get(ROUTES.choice);
    const weight = temporaries.get(ROUTES.weights);
    commands.dispatch(this.pipeline, { logits, bias: this.bias, choice, weight }, {}, { rows });
  }
}
