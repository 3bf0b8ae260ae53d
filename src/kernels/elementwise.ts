import { ceilDiv } from "../base/bytes.ts";
import type { Workgroups } from "../gpu/kernel.ts";

/** Lanes of the kernels that treat each value on its own. */
export const WORKGROUP = 64;

/** One lane per column (or per `perLane` of them), one line of workgroups per row. */
export const overRows =
  (perLane = 1) =>
  ({ rows, columns }: { rows: number; columns: number }): Workgroups => [
    ceilDiv(columns, WORKGROUP * perLane),
    rows,
    1,
  ];
