import type { Pipeline } from "../gpu/kernel.ts";
import { strideOf } from "../gpu/tensor.ts";
import { embed, embedTokens, WORKGROUP } from "../kernels/index.ts";
import type { Matrix } from "./matrix.ts";
import { matrixSpec, type ModuleSpec, temporary } from "./module.ts";
import type { Activations, Pass } from "./pass.ts";

export interface PositionEmbeddingSpec {
  /** Names of the token table [vocabSize, columns], in order of preference. */
  tokens: readonly string[];
  vocabSize: number;
  /** Name of the position table [positions, columns]. */
  positions: string;
  positionCount: number;
  columns: number;
  output: string;
}

/** x = bf16(tokenTable[id] + positionTable[position]): learned positions, GPT-2's. */
export function positionEmbedding(spec: PositionEmbeddingSpec): ModuleSpec<PositionEmbedding> {
  const tokens = matrixSpec(spec.tokens, spec.vocabSize, spec.columns, { gathered: true });
  const positions = matrixSpec([spec.positions], spec.positionCount, spec.columns, { gathered: true });
  return {
    weights: [tokens, positions],
    temporaries: [temporary(spec.output, spec.columns)],
    build: async ({ pipelines, weights }) =>
      new PositionEmbedding(
        spec.output,
        weights.matrix(tokens),
        weights.matrix(positions),
        await pipelines.compile(embed, { STRIDE: strideOf(spec.columns, "bf16"), WORKGROUP }),
      ),
  };
}

export class PositionEmbedding {
  constructor(
    private readonly output: string,
    private readonly tokens: Matrix,
    private readonly positions: Matrix,
    private readonly pipeline: Pipeline<
      "tokens" | "token_table" | "position_table" | "y",
      "first_id" | "ids" | "first_position" | "positions",
      { rows: number; columns: number }
    >,
  ) {}

  forward(pass: Pass): Activations {
    const y = pass.temporaries.get(this.output);
    for (const { firstRow: first_id, tensor: token_table } of this.tokens.parts) {
      for (const { firstRow: first_position, tensor: position_table } of this.positions.parts) {
        pass.commands.dispatch(
          this.pipeline,
          { tokens: pass.tokenTable, token_table, position_table, y },
          { first_id, ids: token_table.rows, first_position, positions: position_table.rows },
          { rows: pass.tokens, columns: y.stride },
        );
      }
    }
    return { tensor: y, rows: pass.tokens };
  }
}

export interface TokenEmbeddingSpec {
  /** Names of the table [vocabSize, columns], in order of preference. */
  names: readonly string[];
  vocabSize: number;
  columns: number;
  /** Factor of every value; 1 for most. */
  scale: number;
  output: string;
}

/** x = bf16(scale · table[id]): models whose positions come in elsewhere. */
export function tokenEmbedding(spec: TokenEmbeddingSpec): ModuleSpec<TokenEmbedding> {
  const table = matrixSpec(spec.names, spec.vocabSize, spec.columns, { gathered: true });
  return {
    weights: [table],
    temporaries: [temporary(spec.output, spec.columns)],
    build: async ({ pipelines, weights }) =>
      new TokenEmbedding(
        spec.output,
        weights.matrix(table),
        await pipelines.compile(embedTokens, {
          STRIDE: strideOf(spec.columns, "bf16"),
          SCALE: spec.scale,
          WORKGROUP,
        }),
      ),
  };
}

export class TokenEmbedding {
  constructor(
    private readonly output: string,
    private readonly table: Matrix,
    private readonly pipeline: Pipeline<
      "tokens" | "token_table" | "y",
      "first_id" | "ids",
      { rows: number; columns: number }
    >,
  ) {}

  forward(pass: Pass): Activations {
    const y = pass.temporaries.get(this.output);
    for (const { firstRow: first_id, rows: ids, tensor: token_table } of this.table.parts) {
      const bindings = { tokens: pass.tokenTable, token_table, y };
      pass.commands.dispatch(this.pipeline, bindings, { first_id, ids }, { rows: pass.tokens, columns: y.stride });
    }
    return { tensor: y, rows: pass.tokens };
  }
}
