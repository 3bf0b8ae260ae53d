import absorbSource from "../../shaders/absorb_query.wgsl" with { type: "text" };
import expandSource from "../../shaders/expand_value.wgsl" with { type: "text" };
import writeSource from "../../shaders/latent_write.wgsl" with { type: "text" };
import bf16 from "../../shaders/lib/bf16.wgsl" with { type: "text" };
import { ceilDiv } from "../base/bytes.ts";
import { defineKernel } from "../gpu/kernel.ts";
import { overRows, WORKGROUP } from "./elementwise.ts";
import { forEachEncoding, WEIGHT_LIBRARIES, withWeight } from "./encoding.ts";

// Multi-head latent attention (DeepSeek-V2): keys and values of all heads are made of one short vector of each token.

export const latentWrite = defineKernel({
  name: "latent_write",
  source: [bf16, writeSource],
  bindings: { x: "read", slots: "read", cache: "read_write" },
  constants: ["STRIDE", "COLUMNS", "WORKGROUP"],
  params: {},
  workgroups: overRows(),
});

/** Tokens that a lane takes together. */
const TOKENS = 4;
const SHAPE = ["PLAIN", "TURNED", "VALUE", "LATENT", "STRIDE", "STRIDE_OUT"] as const;
const params = { rows: "u32", first_head: "u32" } as const;

export const absorbQuery = forEachEncoding((encoding) =>
  defineKernel({
    name: `absorb_query_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, absorbSource],
    ...withWeight(encoding, { bindings: { q: "read", y: "read_write" }, constants: SHAPE }),
    params,
    workgroups: ({ rows, heads, latent }: { rows: number; heads: number; latent: number }) => [
      ceilDiv(latent, 8 * WORKGROUP),
      heads,
      ceilDiv(rows, TOKENS),
    ],
  }),
);

export const expandValue = forEachEncoding((encoding) =>
  defineKernel({
    name: `expand_value_${encoding}`,
    source: [bf16, ...WEIGHT_LIBRARIES[encoding].sources, expandSource],
    ...withWeight(encoding, { bindings: { x: "read", y: "read_write" }, constants: SHAPE }),
    params,
    workgroups: ({ rows, heads, value }: { rows: number; heads: number; value: number }) => [
      ceilDiv(value, WORKGROUP),
      heads,
      ceilDiv(rows, TOKENS),
    ],
  }),
);
