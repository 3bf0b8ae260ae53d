import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import type { Commands } from "../gpu/commands.ts";
import type { Tensor, TensorStore } from "../gpu/tensor.ts";
import { NOT_A_TOKEN } from "../kernels/index.ts";
import type { Model } from "../models/index.ts";
import type { Activations, Pass } from "../nn/index.ts";
import type { EdgePipelines } from "./open-stage.ts";
import { type PassTables, tablesOf } from "./tables.ts";
import type { StageInfo, StepOutput, Want } from "./types.ts";

/** Neighbouring tokens of one sequence in a pass, all rows with ids or all with hidden states. */
export interface PassRow {
  readonly tokens: number;
  readonly positionStart: number;
  /** The sequence's cache pages from position 0 to these tokens. */
  readonly pages: readonly number[];
  /** [tokens] */
  readonly ids?: Int32Array;
  /** [tokens, hiddenSize] bfloat16 */
  readonly hidden?: Uint16Array;
  /** At the tail; elsewhere every row gives its hidden states. */
  readonly want: Want;
  /** Draws the token from its logits, [vocabSize] bfloat16; absent: the likeliest, the lowest id among equals. */
  readonly draw?: (logits: Uint16Array) => StepOutput;
}

export interface DevicePassParts {
  readonly info: StageInfo;
  readonly model: Model;
  readonly edges: EdgePipelines;
  readonly store: TensorStore;
  readonly commands: Commands;
  readonly buffers: ReadonlyMap<string, Tensor>;
}

/** A token of the pass whose logits a row wants. */
interface Wanted {
  readonly row: number;
  readonly token: number;
}

/** Takes rows through the layers of a stage: one submission to the device, and a few at the tail. */
export class DevicePass {
  constructor(private readonly parts: DevicePassParts) {}

  /** What each row gives, or the error that is its own. `tokens` of all rows together have room in the plan. */
  async run(rows: readonly PassRow[]): Promise<(StepOutput | UserError)[]> {
    const tables = tablesOf(rows);
    const pass = this.#begin(tables);
    let stream = rows[0]!.ids ? this.#embed(pass) : this.#enter(pass, rows);
    for (const layer of this.parts.model.layers) stream = layer(pass, stream);

    const { norm, logits } = this.parts.model;
    if (!norm || !logits) return this.#hiddenStates(rows, await this.#leave(stream));
    if (rows.every(({ want }) => want === "none")) {
      await this.parts.commands.finish();
      return rows.map(() => ({ kind: "none" }));
    }
    return await this.#tail(pass, rows, norm(pass, stream));
  }

  #begin(tables: PassTables): Pass {
    const { store, commands, buffers } = this.parts;
    const get = (label: string): Tensor => {
      const tensor = buffers.get(label);
      if (!tensor) throw new Error(`no module declared the temporary ${label}`);
      return tensor;
    };
    for (const label of ["tokens", "slots", "queries", "pages"] as const) store.write(get(label), tables[label]);
    const { runs, singles, longestSingle } = tables;
    return {
      commands,
      temporaries: { get },
      tokens: tables.slots.length,
      tokenTable: get("tokens"),
      slotTable: get("slots"),
      attention: { queries: get("queries"), pages: get("pages"), runs, singles, longestSingle },
    };
  }

  #embed(pass: Pass): Activations {
    if (!this.parts.model.embed) throw new Error("token ids for a stage that is not the head");
    return this.parts.model.embed(pass);
  }

  #enter(pass: Pass, rows: readonly PassRow[]): Activations {
    const { buffers, store, commands, edges, info } = this.parts;
    const wire = buffers.get("wire")!;
    const stream = pass.temporaries.get("stream");
    const columns = info.hiddenSize;
    const values = new Uint16Array(Math.ceil((pass.tokens * columns) / 2) * 2);
    let at = 0;
    for (const { hidden } of rows) {
      values.set(hidden!, at);
      at += hidden!.length;
    }
    store.write(wire, values);
    commands.dispatch(edges.unpackHidden, { x: wire, y: stream }, {}, { rows: pass.tokens, columns });
    return { tensor: stream, rows: pass.tokens };
  }

  #hiddenStates(rows: readonly PassRow[], values: Uint16Array): StepOutput[] {
    let at = 0;
    return rows.map(({ tokens }) => ({
      kind: "hidden",
      values: values.slice(at, (at += tokens * this.parts.info.hiddenSize)),
    }));
  }

  async #tail(pass: Pass, rows: readonly PassRow[], normed: Activations): Promise<(StepOutput | UserError)[]> {
    const outputs: (StepOutput | UserError)[] = rows.map(() => ({ kind: "none" }));
    if (rows.some(({ want }) => want === "hidden")) {
      const states = this.#hiddenStates(rows, await this.#leave(normed));
      rows.forEach(({ want }, row) => want === "hidden" && (outputs[row] = states[row]!));
    }

    const likeliest: Wanted[] = [];
    const valued: Wanted[] = [];
    let first = 0;
    rows.forEach(({ tokens, want, draw }, row) => {
      const last = { row, token: first + tokens - 1 };
      if (want === "token") (draw ? valued : likeliest).push(last);
      else if (want === "logits") valued.push(last);
      else if (want === "all_logits") {
        for (let token = first; token <= last.token; token++) valued.push({ row, token });
      }
      first += tokens;
    });
    await this.#likeliest(pass, normed, likeliest, outputs);
    await this.#values(pass, normed, valued, rows, outputs);
    return outputs;
  }

  async #likeliest(pass: Pass, normed: Activations, wanted: readonly Wanted[], outputs: (StepOutput | UserError)[]) {
    const { commands, edges, buffers } = this.parts;
    const token = buffers.get("argmax")!;
    for (const { some, logits } of this.#head(pass, normed, wanted)) {
      commands.dispatch(edges.argmax, { x: logits.tensor, token }, {}, logits);
      const ids = new Uint32Array((await commands.read(token, logits.rows * 4)).buffer);
      some.forEach(({ row }, i) => {
        outputs[row] = ids[i] === NOT_A_TOKEN ? this.#nonFinite() : { kind: "token", id: ids[i]! };
      });
    }
  }

  async #values(
    pass: Pass,
    normed: Activations,
    wanted: readonly Wanted[],
    rows: readonly PassRow[],
    outputs: (StepOutput | UserError)[],
  ): Promise<void> {
    const { vocabSize } = this.parts.info;
    const filled = new Map<number, number>();
    for (const { some, logits } of this.#head(pass, normed, wanted)) {
      const values = await this.#pack(this.parts.edges.packLogits, logits.tensor, logits.rows * vocabSize);
      for (const [i, { row }] of some.entries()) {
        const one = values.subarray(i * vocabSize, (i + 1) * vocabSize);
        const { want, tokens, draw } = rows[row]!;
        if (want === "token") {
          outputs[row] = one.some(isNaN16) ? this.#nonFinite() : draw!(one);
          continue;
        }
        const at = filled.get(row) ?? 0;
        if (at === 0) {
          const kind = want === "logits" ? "logits" : "all_logits";
          outputs[row] = { kind, values: new Uint16Array((want === "logits" ? 1 : tokens) * vocabSize) };
        }
        (outputs[row] as { values: Uint16Array }).values.set(one, at);
        filled.set(row, at + vocabSize);
      }
    }
  }

  /** The head over some tokens of the pass, as many at a time as its output has room for. */
  *#head(pass: Pass, normed: Activations, wanted: readonly Wanted[]) {
    const { buffers, commands, store, edges, model } = this.parts;
    const index = buffers.get("gather_index")!;
    const gathered = buffers.get("gathered")!;
    for (let first = 0; first < wanted.length; first += gathered.rows) {
      const some = wanted.slice(first, first + gathered.rows);
      commands.flush(); // what reads the index of the round before comes first
      store.write(
        index,
        Uint32Array.from(some, ({ token }) => token),
      );
      const dims = { rows: some.length, columns: gathered.stride };
      commands.dispatch(edges.gather, { x: normed.tensor, index, y: gathered }, {}, dims);
      yield { some, logits: model.logits!(pass, { tensor: gathered, rows: some.length }) };
    }
  }

  async #leave({ tensor, rows }: Activations): Promise<Uint16Array> {
    return this.#pack(this.parts.edges.packHidden, tensor, rows * this.parts.info.hiddenSize);
  }

  async #pack(pipeline: EdgePipelines["packHidden"], x: Tensor, count: number): Promise<Uint16Array> {
    const { buffers, commands } = this.parts;
    const wire = buffers.get("wire")!;
    commands.dispatch(pipeline, { x, y: wire }, { count }, { count });
    return new Uint16Array((await commands.read(wire, count * 2)).buffer);
  }

  #nonFinite(): UserError {
    return new UserError(
      "non_finite",
      `the logits are not numbers: activations overflowed in layers ${formatSpan(this.parts.info.span)} or before`,
      "check the checkpoint's weights for NaN and infinity",
    );
  }
}

const isNaN16 = (bits: number): boolean => (bits & 0x7fff) > 0x7f80;
