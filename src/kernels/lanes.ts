import byEight from "../../shaders/lib/block_lanes8.wgsl" with { type: "text" };
import byFour from "../../shaders/lib/block_lanes4.wgsl" with { type: "text" };
import alone from "../../shaders/lib/block_plain.wgsl" with { type: "text" };

/** Outputs that a workgroup of a kernel for CPUs makes: one in each lane. */
export const LANES = 32;

/** How the lanes of such a kernel share their loads of x: by subgroups of at least so many lanes, or not at all. */
export type Sharing = "lanes8" | "lanes4" | "plain";

/** One kernel for each way, given the library that stands in front of it. */
export const forEachSharing = <K>(define: (block: string) => K): Readonly<Record<Sharing, K>> => ({
  lanes8: define(byEight),
  lanes4: define(byFour),
  plain: define(alone),
});

/** Lanes that the subgroups of a device must have at least, the best way first. */
export const SUBGROUP_LANES: Readonly<Record<Sharing, number>> = { lanes8: 8, lanes4: 4, plain: 0 };

/** The best way for a device whose subgroups have at least so many lanes; 0: it has none. */
export function sharingFor(subgroupMinSize: number): Sharing {
  const ways = Object.keys(SUBGROUP_LANES) as Sharing[];
  return ways.find((way) => SUBGROUP_LANES[way] <= subgroupMinSize)!;
}
