import { bytesOf } from "../base/bytes.ts";
import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf } from "../gpu/tensor.ts";
import { rope as kernel, WORKGROUP } from "../kernels/index.ts";
import type { HeadColumns } from "./heads.ts";
import { type ModuleSpec, temporary } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface RopeTableSpec {
  /** The temporary that holds it: [positions, 2 · pairs] float32, per position the cosines, then the sines. */
  label: string;
  positions: number;
  pairs: number;
  /** Fills in one position: [pairs] each. */
  angles: (position: number, cosines: Float32Array, sines: Float32Array) => void;
}

/** Positions that are made and written at a time. */
const ROWS_AT_A_TIME = 1024;

/** The angles of every position that a sequence can have, made by the host when the stage is built. */
export function ropeTable({ label, positions, pairs, angles }: RopeTableSpec): ModuleSpec<void> {
  return {
    weights: [],
    temporaries: [temporary(label, 2 * pairs, { rows: positions })],
    build: async ({ fill }) => {
      const stride = strideOf(2 * pairs, "f32");
      for (let first = 0; first < positions; first += ROWS_AT_A_TIME) {
        const rows = Math.min(ROWS_AT_A_TIME, positions - first);
        const values = new Float32Array(rows * stride);
        for (let row = 0; row < rows; row++) {
          const at = row * stride;
          angles(first + row, values.subarray(at, at + pairs), values.subarray(at + pairs, at + 2 * pairs));
        }
        fill(label, first, bytesOf(values));
      }
    },
  };
}

export interface RopeSpec {
  /** The table of angles, and how many pairs of each head it turns. */
  table: Pick<RopeTableSpec, "label" | "pairs">;
  /** Columns of a row of x. */
  columns: number;
  places: readonly HeadColumns[];
  /** Pairs are neighbours (2i, 2i + 1), not (i, i + pairs). */
  interleaved?: boolean;
}

/** (a, b) = (a cos - b sin, b cos + a sin) for the pairs of each head, in place, by each token's position. */
export function rope({ table, columns, places, interleaved = false }: RopeSpec): ModuleSpec<Rope> {
  return {
    weights: [],
    temporaries: [],
    build: async ({ pipelines }) => {
      const turns = [];
      for (const { first, heads, headStride } of places) {
        const pipeline = await pipelines.compile(kernel, {
          HEADS: heads,
          HEAD_STRIDE: headStride,
          FIRST: first,
          PAIRS: table.pairs,
          INTERLEAVED: interleaved ? 1 : 0,
          STRIDE: strideOf(columns, "f32"),
          ANGLE_STRIDE: strideOf(2 * table.pairs, "f32"),
          WORKGROUP,
        });
        turns.push({ pipeline, columns: heads * table.pairs });
      }
      return new Rope(table.label, turns);
    },
  };
}

export class Rope {
  constructor(
    private readonly table: string,
    private readonly turns: readonly {
      pipeline: Pipeline<"tokens" | "angles" | "x", never, { rows: number; columns: number }>;
      columns: number;
    }[],
  ) {}

  forward(pass: Pass, { tensor: x, rows }: Activations): Activations {
    const bindings = { tokens: pass.tokenTable, angles: pass.temporaries.get(this.table), x };
    for (const { pipeline, columns } of this.turns) pass.commands.dispatch(pipeline, bindings, {}, { rows, columns });
    return { tensor: x, rows };
  }
}
