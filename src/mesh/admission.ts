import { UserError } from "../base/errors.ts";
import type { Logger } from "../base/log.ts";
import { PROTOCOL_VERSION } from "../protocol/headers.ts";
import type { NodeInfo } from "../protocol/info.ts";
import type { NextNode } from "./next-node.ts";

type State =
  /** Not admitted (any more): calls are refused with `why`. */
  | { readonly kind: "refused"; readonly why: UserError }
  /** Admitted, which it stays while it is down for a moment: calls go to it and fail by themselves. */
  | { readonly kind: "admitted"; readonly node: NodeInfo; readonly notReady: string | undefined };

/** How often a next node that is well is looked at, and how the waits grow while it is not. */
const DEFAULT_POLL = { wellMs: 2_000, firstMs: 100, mostMs: 2_000 };

/**
 * Watches the next node: a chain that does not fit together never runs. It looks in the background, so that a question
 * about readiness is answered from what was last seen and never runs down the chain.
 */
export class Admission {
  readonly next: NextNode;
  readonly #log: Logger;
  readonly #poll: typeof DEFAULT_POLL;
  #state: State;
  #stopped = false;
  #wake: () => void = () => {};

  constructor(options: { next: NextNode; log: Logger; poll?: Partial<typeof DEFAULT_POLL> }) {
    this.next = options.next;
    this.#log = options.log;
    this.#poll = { ...DEFAULT_POLL, ...options.poll };
    this.#state = { kind: "refused", why: this.#notYet(`the next node ${this.next.url} has not answered yet`) };
  }

  /**
   * Begins to watch. Resolves when the next node is first admitted, or by `stop`; until then it waits for a next node
   * that cannot be reached. Rejects with a UserError that holds both values where the two nodes do not fit together.
   */
  start(): Promise<void> {
    return new Promise((resolve, reject) => void this.#watch(resolve, reject));
  }

  stop(): void {
    this.#stopped = true;
    this.#wake();
  }

  /** Looks now: a call has just met something unexpected. */
  recheck(): void {
    this.#wake();
  }

  /** `recheck` where a reply came from another process than the one that was admitted. */
  seen(node: string | null): void {
    if (this.#state.kind === "admitted" && node !== null && node !== this.#state.node.node) this.recheck();
  }

  /** What the next node said of itself when it was last admitted; undefined before. */
  get node(): NodeInfo | undefined {
    return this.#state.kind === "admitted" ? this.#state.node : undefined;
  }

  /** The longest sequence that the nodes after this one take, as far as is known. */
  get maxContext(): number {
    return this.node?.max_context ?? Infinity;
  }

  /** Why calls may not be passed on, or undefined. */
  get refusal(): UserError | undefined {
    return this.#state.kind === "refused" ? this.#state.why : undefined;
  }

  /** Why the rest of the chain is not ready, or undefined. */
  get notReady(): string | undefined {
    return this.#state.kind === "refused" ? this.#state.why.message : this.#state.notReady;
  }

  async #watch(admitted: () => void, mismatch: (error: UserError) => void): Promise<void> {
    let everAdmitted = false;
    let waitMs = this.#poll.firstMs;
    while (!this.#stopped) {
      const state = await this.#look();
      if (this.#stopped) break;
      this.#become(state, everAdmitted);
      if (state.kind === "admitted") {
        everAdmitted = true;
        admitted();
      } else if (!everAdmitted && state.why.code !== "not_ready") {
        return mismatch(state.why);
      }
      const isWell = state.kind === "admitted" && state.notReady === undefined;
      waitMs = isWell ? this.#poll.firstMs : Math.min(waitMs * 2, this.#poll.mostMs);
      await this.#sleep(isWell ? this.#poll.wellMs : waitMs);
    }
    admitted();
  }

  async #look(): Promise<State> {
    try {
      const node = await this.next.info();
      const misfit = misfitOf(this.next, node);
      if (misfit) return { kind: "refused", why: misfit };
      return { kind: "admitted", node, notReady: (await this.next.notReady())?.message };
    } catch (cause) {
      const problem = cause instanceof Error ? cause.message : String(cause);
      // One that was admitted stays so: it may only be restarting, and the frame guards every call.
      if (this.#state.kind === "admitted") return { ...this.#state, notReady: problem };
      return { kind: "refused", why: this.#notYet(problem, cause) };
    }
  }

  #become(state: State, everAdmitted: boolean): void {
    const before = this.#state;
    this.#state = state;
    const problem = this.notReady;
    const { url } = this.next;
    if (state.kind === "admitted") {
      const isNew = before.kind === "refused" || before.node.node !== state.node.node;
      if (isNew) this.#log.info("next node admitted", { next: url, node: state.node.node });
      if (problem === undefined && (isNew || before.notReady !== undefined))
        this.#log.info("next node ready", { next: url });
    }
    if (problem === undefined || problem === problemOf(before)) return;
    if (state.kind === "refused" && state.why.code !== "not_ready" && everAdmitted) {
      this.#log.error("next node was replaced and does not fit", { next: url, problem, hint: state.why.hint });
    } else {
      this.#log.warn("next node not ready", { next: url, problem });
    }
  }

  #notYet(problem: string, cause?: unknown): UserError {
    return new UserError("not_ready", problem, "start that node, or correct --next; this one keeps trying", { cause });
  }

  #sleep(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

const problemOf = (state: State): string | undefined => (state.kind === "refused" ? state.why.message : state.notReady);

/** The first thing in which two nodes do not fit, with both values. */
function misfitOf({ url, own }: NextNode, info: NodeInfo): UserError | undefined {
  const misfit = (
    code: "next_nonsense" | "model_mismatch" | "from_layer",
    theirs: string,
    ours: string,
    hint: string,
  ) => new UserError(code, `the next node ${url} ${theirs}, and this node ${ours}`, hint);
  if (info.v !== PROTOCOL_VERSION) {
    const hint = "run the same version of meshnet on both";
    return misfit("next_nonsense", `speaks protocol version ${info.v}`, `version ${PROTOCOL_VERSION}`, hint);
  }
  if (info.model !== own.model) {
    const hint = "start both with the same --model-id and --revision";
    return misfit("model_mismatch", `holds the model ${info.model} (${info.model_id})`, own.model, hint);
  }
  if (info.start !== own.end) {
    const hint = `start the next node with --shard-start ${own.end}`;
    return misfit("from_layer", `holds layers ${info.start}-${info.end}`, `ends at layer ${own.end}`, hint);
  }
  const { context } = own;
  if (context && context.own > context.edge !== info.max_context > context.edge) {
    const hint = `beyond ${context.edge} tokens of context this model turns positions otherwise: give all nodes the same --max-context`;
    return misfit("model_mismatch", `has a context of ${info.max_context} tokens`, `one of ${context.own}`, hint);
  }
  const sizes = `hidden size ${info.hidden_size} and vocabulary ${info.vocab_size}`;
  const ownSizes = `hidden size ${own.hiddenSize} and vocabulary ${own.vocabSize}`;
  return sizes === ownSizes
    ? undefined
    : misfit("model_mismatch", `has ${sizes}`, ownSizes, "look at both config.json");
}
