import { sum } from "../base/bytes.ts";
import { UserError } from "../base/errors.ts";
import { formatSpan } from "../base/span.ts";
import type { Commands } from "../gpu/commands.ts";
import type { Tensor, TensorStore } from "../gpu/tensor.ts";
import { NOT_A_TOKEN } from "../kernels/index.ts";
import type { Model } from "../models/index.ts";
import type { Activations, Pass } from "../nn/index.ts";
import { MAX_ROWS } from "../weights/plan.ts";
import type { EdgePipelines, StageSource } from "./open-stage.ts";
import { tablesOf } from "./tables.ts";
import type { Row, Stage, StageInfo, StageInput, StageOutput, Want } from "./types.ts";

/** Enough rows for the kernels that take many. */
const PREFILL_WARM_UP_TOKENS = 16;

export class GpuStage implements Stage {
  readonly info: StageInfo;
  #queue: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly source: StageSource,
    private readonly model: Model,
    private readonly edges: EdgePipelines,
    private readonly store: TensorStore,
    private readonly commands: Commands,
    private readonly buffers: ReadonlyMap<string, Tensor>,
  ) {
    const { config, plan, eosTokenIds } = source;
    this.info = {
      span: plan.options.span,
      hiddenSize: config.hiddenSize,
      vocabSize: config.vocabSize,
      maxContext: plan.options.maxContext,
      eosTokenIds,
    };
  }

  /** Bytes on the device, as allocated. */
  get allocatedBytes(): number {
    return this.store.allocatedBytes + this.commands.allocatedBytes;
  }

  /**
   * Runs both ways through every kernel once, so that a driver that compiles at first use does so before the node says
   * that it is ready.
   */
  async warmUp(): Promise<void> {
    for (const tokens of [1, Math.min(PREFILL_WARM_UP_TOKENS, this.info.maxContext)]) {
      const rows = [{ tokens, positionStart: 0 }];
      await this.forward(
        this.model.embed
          ? { kind: "ids", rows, ids: new Int32Array(tokens) }
          : { kind: "hidden", rows, hidden: new Uint16Array(tokens * this.info.hiddenSize) },
        "token",
      );
    }
  }

  forward(input: StageInput, want: Want, signal?: AbortSignal): Promise<StageOutput> {
    const result = this.#queue.then(() => this.#forward(input, want, signal));
    this.#queue = result.catch(() => {});
    return result;
  }

  destroy(): void {
    this.store.destroyAll();
    this.commands.destroy();
  }

  /** Rows never meet in a kernel, so a call that is larger than a pass is made in several. */
  async #forward(input: StageInput, want: Want, signal?: AbortSignal): Promise<StageOutput> {
    checkInput(input, this.info);
    const outputs: StageOutput[] = [];
    for (const part of splitInput(input, this.source.plan.maxTokens, this.info.hiddenSize)) {
      signal?.throwIfAborted();
      outputs.push(await this.#checkedPass(part, want));
    }
    return joinOutputs(outputs);
  }

  /** A GPU error does not throw where it happens: without a look at the count, zeros would pass for results. */
  async #checkedPass(input: StageInput, want: Want): Promise<StageOutput> {
    const { device } = this.source;
    const errors = device.uncapturedErrors;
    const output = await this.#pass(input, want);
    if (device.uncapturedErrors === errors) return output;
    throw new Error(`${device.info.name} reported an error in this pass: the log has it`);
  }

  async #pass(input: StageInput, want: Want): Promise<StageOutput> {
    const tables = tablesOf(input.rows, input.kind === "ids" ? input.ids : undefined);
    const pass = this.#beginPass(tables);
    let stream = input.kind === "ids" ? this.#embed(pass) : this.#enter(pass, input.hidden);
    for (const layer of this.model.layers) stream = layer(pass, stream);

    const { norm, logits } = this.model;
    if (!norm || !logits) return { kind: "hidden", values: await this.#leave(stream) };
    switch (want) {
      case "none":
        await this.commands.finish();
        return { kind: "none" };
      case "hidden":
        return { kind: "hidden", values: await this.#leave(norm(pass, stream)) };
      case "all_logits": {
        const everyToken = Uint32Array.from({ length: pass.tokens }, (_, token) => token);
        return { kind: "all_logits", values: await this.#logits(pass, norm(pass, stream), everyToken) };
      }
      case "logits":
        return { kind: "logits", values: await this.#logits(pass, norm(pass, stream), tables.lastTokens) };
      case "token":
        return { kind: "token", ids: await this.#tokens(pass, norm(pass, stream), tables.lastTokens) };
    }
  }

  #beginPass(tables: ReturnType<typeof tablesOf>): Pass {
    const buffer = (label: string): Tensor => {
      const tensor = this.buffers.get(label);
      if (!tensor) throw new Error(`no module declared the temporary ${label}`);
      return tensor;
    };
    this.store.write(buffer("tokens"), tables.tokens);
    this.store.write(buffer("slots"), tables.slots);
    this.store.write(buffer("queries"), tables.queries);
    // Nothing outlives the call, so one layer's cache serves all layers, one after another.
    const cache = { keys: buffer("keys"), values: buffer("values") };
    return {
      commands: this.commands,
      temporaries: { get: buffer },
      tokens: tables.slots.length,
      tokenTable: buffer("tokens"),
      slotTable: buffer("slots"),
      attention: {
        table: buffer("queries"),
        runs: tables.runs,
        isDecode: tables.isDecode,
        longestContext: tables.longestContext,
      },
      cache: () => cache,
    };
  }

  #embed(pass: Pass): Activations {
    if (!this.model.embed) throw new Error("token ids for a stage that is not the head");
    return this.model.embed(pass);
  }

  #enter(pass: Pass, hidden: Uint16Array): Activations {
    const wire = this.buffers.get("wire")!;
    const stream = pass.temporaries.get("stream");
    this.store.write(wire, hidden.length % 2 === 0 ? hidden : Uint16Array.from([...hidden, 0]));
    const dims = { rows: pass.tokens, columns: this.info.hiddenSize };
    this.commands.dispatch(this.edges.unpackHidden, { x: wire, y: stream }, {}, dims);
    return { tensor: stream, rows: pass.tokens };
  }

  async #leave({ tensor, rows }: Activations): Promise<Uint16Array> {
    return this.#pack(this.edges.packHidden, tensor, rows * this.info.hiddenSize);
  }

  async #pack(pipeline: typeof this.edges.packHidden, x: Tensor, count: number): Promise<Uint16Array> {
    const wire = this.buffers.get("wire")!;
    this.commands.dispatch(pipeline, { x, y: wire }, { count }, { count });
    return new Uint16Array((await this.commands.read(wire, count * 2)).buffer);
  }

  /** [tokens.length, vocabSize] bfloat16 logits of the given tokens of the pass. */
  async #logits(pass: Pass, hidden: Activations, tokens: Uint32Array): Promise<Uint16Array> {
    const { vocabSize } = this.info;
    const values = new Uint16Array(tokens.length * vocabSize);
    for (const { first, logits } of this.#head(pass, hidden, tokens)) {
      values.set(await this.#pack(this.edges.packLogits, logits.tensor, logits.rows * vocabSize), first * vocabSize);
    }
    return values;
  }

  async #tokens(pass: Pass, hidden: Activations, tokens: Uint32Array): Promise<number[]> {
    const ids: number[] = [];
    const token = this.buffers.get("argmax")!;
    for (const { logits } of this.#head(pass, hidden, tokens)) {
      this.commands.dispatch(this.edges.argmax, { x: logits.tensor, token }, {}, logits);
      ids.push(...new Uint32Array((await this.commands.read(token, logits.rows * 4)).buffer));
    }
    const broken = ids.indexOf(NOT_A_TOKEN);
    if (broken >= 0) {
      throw new UserError(
        "non_finite",
        `the logits of row ${broken} are not numbers: activations overflowed in layers ${formatSpan(this.info.span)} or before`,
        "check the checkpoint's weights for NaN and infinity",
        { details: { row: broken } },
      );
    }
    return ids;
  }

  /** The head over the given tokens, as many at a time as its output has room for. */
  *#head(pass: Pass, hidden: Activations, tokens: Uint32Array): Generator<{ first: number; logits: Activations }> {
    const index = this.buffers.get("gather_index")!;
    const gathered = this.buffers.get("gathered")!;
    for (let first = 0; first < tokens.length; first += gathered.rows) {
      const some = tokens.subarray(first, first + gathered.rows);
      this.commands.flush(); // what reads the index of the round before comes first
      this.store.write(index, some);
      const dims = { rows: some.length, columns: gathered.stride };
      this.commands.dispatch(this.edges.gather, { x: hidden.tensor, index, y: gathered }, {}, dims);
      yield { first, logits: this.model.logits!(pass, { tensor: gathered, rows: some.length }) };
    }
  }
}

/** A last line of defence: callers check at the border, and a kernel must never index with what they missed. */
function checkInput({ rows, ...input }: StageInput, { maxContext, vocabSize, hiddenSize, span }: StageInfo): void {
  const tokens = sum(rows.map((row) => row.tokens));
  if (rows.length === 0 || rows.some((row) => row.tokens < 1)) {
    throw new UserError("empty_prompt", "a row without a token", "send at least one token per row");
  }
  if (rows.length > MAX_ROWS) {
    throw new UserError(
      "too_large",
      `${rows.length} rows in one call, and a node takes ${MAX_ROWS}`,
      "send fewer rows at a time",
    );
  }
  rows.forEach((row, index) => {
    if (row.positionStart !== 0) {
      throw new UserError("not_supported", "a row that continues a session", "send the whole sequence", {
        details: { row: index },
      });
    }
    if (row.tokens > maxContext) {
      throw new UserError(
        "context_exceeded",
        `row ${index} has ${row.tokens} tokens, and the context is ${maxContext}`,
        "send a shorter sequence",
        { details: { row: index } },
      );
    }
  });
  if (input.kind === "hidden") {
    if (input.hidden.length === tokens * hiddenSize) return;
    throw new UserError(
      "hidden_size",
      `${input.hidden.length} values for ${tokens} tokens, and each has ${hiddenSize}`,
      "send hidden states of this model",
    );
  }
  if (span.start !== 0)
    throw new UserError("unsupported_spelling", "token ids for a node that is not the head", "send hidden states");
  if (input.ids.length !== tokens) throw new Error(`${input.ids.length} ids for ${tokens} tokens`);
  const wrong = input.ids.findIndex((id) => id < 0 || id >= vocabSize);
  if (wrong >= 0) {
    throw new UserError(
      "token_id",
      `token id ${input.ids[wrong]} is outside the vocabulary of ${vocabSize}`,
      "use this model's tokenizer",
    );
  }
}

/** Whole rows, as many as a pass has room for. */
function* splitInput(input: StageInput, maxTokens: number, hiddenSize: number): Generator<StageInput> {
  let firstToken = 0;
  for (let firstRow = 0; firstRow < input.rows.length;) {
    const rows: Row[] = [];
    let tokens = 0;
    while (firstRow < input.rows.length && tokens + input.rows[firstRow]!.tokens <= maxTokens) {
      tokens += input.rows[firstRow]!.tokens;
      rows.push(input.rows[firstRow++]!);
    }
    const end = firstToken + tokens;
    if (input.kind === "ids") yield { kind: "ids", rows, ids: input.ids.subarray(firstToken, end) };
    else yield { kind: "hidden", rows, hidden: input.hidden.subarray(firstToken * hiddenSize, end * hiddenSize) };
    firstToken = end;
  }
}

function joinOutputs(outputs: readonly StageOutput[]): StageOutput {
  const [first] = outputs;
  if (outputs.length === 1 || first!.kind === "none") return first!;
  if (first!.kind === "token") return { kind: "token", ids: outputs.flatMap((o) => (o.kind === "token" ? o.ids : [])) };
  const parts = outputs.flatMap((output) => ("values" in output ? [output.values] : []));
  const values = new Uint16Array(sum(parts.map((part) => part.length)));
  let at = 0;
  for (const part of parts) {
    values.set(part, at);
    at += part.length;
  }
  return { kind: first!.kind, values };
}
