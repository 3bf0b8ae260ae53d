import addGatedSource from "../../shaders/add_gated.wgsl" with { type: "text" };
import combineSource from "../../shaders/combine_experts.wgsl" with { type: "text" };
import gemmSource from "../../shaders/expert_gemm.wgsl" with { type: "text" };
import gemvSource from "../../shaders/expert_gemv.wgsl" with { type: "text" };
import lanesSource from "../../shaders/expert_lanes.wgsl" with { type: "text" };
import groupSource from "../../shaders/group_pairs.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import blockSum from "../../shaders/lib/block_sum.wgsl" with { type: "text" };
import sigmoid from "../../shaders/lib/sigmoid.wgsl" with { type: "text" };
import routeSource from "../../shaders/route.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { overRows } from "./elementwise.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";
import { GEMV_OUTPUTS } from "./gemv.ts";
import { forEachSharing, LANES } from "./lanes.ts";

// A mixture of experts: which experts each token takes, the products with these alone, and their sum. A pair is a token and
// one of its experts: pair p is choice p % chosen of token p / chosen.

export const route = defineKernel({
  name: "route",
  source: [sigmoid, routeSource],
  bindings: { logits: "read", bias: "read", choice: "read_write", weight: "read_write" },
  constants: [
    "EXPERTS",
    "STRIDE",
    "CHOSEN",
    "SIGMOID",
    "HAS_BIAS",
    "GROUPS",
    "TOP_GROUPS",
    "GROUP_BEST",
    "NORMALIZE",
    "SCALE",
  ],
  params: {},
  workgroups: ({ rows }: { rows: number }) => [rows, 1, 1],
});

/** Pairs of one expert that `expertGemm` takes together, and outputs that it makes at a time. */
export const EXPERT_TILE = 32;

/** Words of one entry of the `tiles` table. */
export const TILE_WORDS = 4;

/** The most tiles that so many pairs can make: each expert may leave one unfilled. */
export const tilesOf = (pairs: number, experts: number): number =>
  Math.min(pairs, Math.floor(pairs / EXPERT_TILE) + experts);

export const groupPairs = defineKernel({
  name: "group_pairs",
  source: [groupSource],
  bindings: { choice: "read", order: "read_write", tiles: "read_write" },
  constants: ["EXPERTS"],
  params: { pairs: "u32", tiles: "u32" },
  workgroups: () => [1, 1, 1],
});

const params = { first_expert: "u32", experts: "u32", outputs: "u32", first_output: "u32" } as const;

export const expertGemv = forEachEncoding((encoding) =>
  defineKernel({
    name: `expert_gemv_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, gemvSource],
    ...withWeight(encoding, {
      bindings: { x: "read", choice: "read", y: "read_write" },
      constants: ["OUTPUTS", "STRIDE_OUT", "OUT_AT", "SHARE", "BLOCKS"],
    }),
    params,
    workgroups: ({ pairs, outputs }: { pairs: number; outputs: number }) => [ceilDiv(outputs, GEMV_OUTPUTS), pairs, 1],
  }),
);

export const expertLanes = forEachSharing((block) =>
  forEachEncoding((encoding) =>
    defineKernel({
      name: `expert_lanes_${encoding}`,
      source: [block, bf16, ...WEIGHT_LIBRARIES[encoding].sources, blockSum, lanesSource],
      ...withWeight(encoding, {
        bindings: { x: "read", choice: "read", y: "read_write" },
        constants: ["STRIDE_OUT", "OUT_AT", "SHARE"],
      }),
      params,
      workgroups: ({ pairs, outputs }: { pairs: number; outputs: number }) => [ceilDiv(outputs, LANES), pairs, 1],
    }),
  ),
);

export const expertGemm = forEachEncoding((encoding) =>
  defineKernel({
    name: `expert_gemm_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, gemmSource],
    ...withWeight(encoding, {
      bindings: { x: "read", order: "read", tiles: "read", y: "read_write" },
      constants: ["STRIDE_OUT", "OUT_AT", "SHARE"],
    }),
    params,
    workgroups: ({ tiles, outputs }: { tiles: number; outputs: number }) => [ceilDiv(outputs, EXPERT_TILE), tiles, 1],
  }),
);

export const combineExperts = defineKernel({
  name: "combine_experts",
  source: [combineSource],
  bindings: { x: "read", weight: "read", y: "read_write" },
  constants: ["CHOSEN", "STRIDE", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});

export const addGated = defineKernel({
  name: "add_gated",
  source: [sigmoid, addGatedSource],
  bindings: { x: "read", gate: "read", y: "read_write" },
  constants: ["STRIDE", "GATE_STRIDE", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});
