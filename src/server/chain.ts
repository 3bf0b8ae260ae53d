import { messageOf, UserError } from "../base/errors.ts";
import type { Stage } from "../engine/types.ts";
import type { Admission } from "../mesh/admission.ts";
import type { ChainNode } from "../protocol/chain.ts";
import { RemoteError } from "../protocol/error-reply.ts";
import type { Readiness } from "./health.ts";

/** So long a node waits for what those after it say, where its caller leaves it more time or says nothing. */
const PATIENCE_MS = 2_000;
/** Of its own time a node leaves the next one so much: that one asks another one, and has to answer before it is over. */
const SHARE = 0.9;
/** With less than this there is no sense in asking: the chain is as long as that, or goes round. */
const LEAST_MS = 50;
/** Many may look at a chain; its nodes are asked once. */
const KEPT_MS = 1_000;

export interface ChainParts {
  readonly stage: Stage;
  readonly node: string;
  readonly device: string;
  readonly quantization: string;
  readonly readiness: Readiness;
  readonly next: Admission | undefined;
  readonly tokensPerSecond: () => number;
  /** Milliseconds from anywhere; default `performance.now`. */
  readonly clock?: () => number;
}

/** What this node and those after it are and do now. Nothing of what they compute is in it. */
export class ChainState {
  readonly #parts: ChainParts;
  readonly #clock: () => number;
  #beyond: { readonly nodes: Promise<ChainNode[]>; settledAt: number } | undefined;

  constructor(parts: ChainParts) {
    this.#parts = parts;
    this.#clock = parts.clock ?? (() => performance.now());
  }

  /** In the order of their layers, this one first. A node that does not answer is told as such, and is the last one. */
  async nodes(withinMs = PATIENCE_MS): Promise<ChainNode[]> {
    const [own, beyond] = await Promise.all([this.#own(), this.#kept(Math.min(withinMs, PATIENCE_MS) * SHARE)]);
    return [own, ...beyond];
  }

  async #own(): Promise<ChainNode> {
    const { stage, node, device, quantization, readiness, tokensPerSecond } = this.#parts;
    const problem = await readiness.check().then(
      () => null,
      (error: unknown) => {
        if (error instanceof UserError) return error.message;
        throw error;
      },
    );
    return {
      node,
      start: stage.info.span.start,
      end: stage.info.span.end,
      device,
      quantization,
      sessions: stage.cacheUse.sessions,
      tokens_per_second: Math.round(tokensPerSecond() * 10) / 10,
      ready: problem === null,
      problem,
    };
  }

  #kept(withinMs: number): Promise<ChainNode[]> {
    const now = this.#clock();
    if (this.#beyond && now - this.#beyond.settledAt < KEPT_MS) return this.#beyond.nodes;
    const kept = { nodes: this.#ask(withinMs), settledAt: Infinity };
    this.#beyond = kept;
    void kept.nodes.finally(() => (kept.settledAt = this.#clock())).catch(() => {}); // whoever asked is told
    return kept.nodes;
  }

  async #ask(withinMs: number): Promise<ChainNode[]> {
    const { next } = this.#parts;
    if (next === undefined) return [];
    if (next.refusal) return [this.#silent(next.refusal.message)];
    if (withinMs < LEAST_MS) return [this.#silent("too many nodes stand before it: there was no time left to ask it")];
    try {
      return await next.next.chain(Math.floor(withinMs));
    } catch (error) {
      if (error instanceof UserError || error instanceof RemoteError) return [this.#silent(messageOf(error))];
      throw error;
    }
  }

  /** A next node that has not answered, with what it said when it was admitted. */
  #silent(problem: string): ChainNode {
    const { stage, next } = this.#parts;
    const known = next?.node;
    return {
      node: null,
      start: stage.info.span.end,
      end: known?.end ?? null,
      device: known?.device ?? null,
      quantization: known?.quantization ?? null,
      sessions: null,
      tokens_per_second: null,
      ready: false,
      problem,
    };
  }
}
