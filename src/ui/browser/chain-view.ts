import type { ChainInfo, ChainNode } from "../../protocol/chain.ts";
import { byId, make, setText } from "./dom.ts";

/** The chain in one line, and each of its nodes in another. */
export class ChainView {
  readonly #light = byId("chain-light", HTMLSpanElement);
  readonly #summary = byId("chain-summary", HTMLSpanElement);
  readonly #strip = byId("chain-strip", HTMLDivElement);
  readonly #nodes = byId("chain-nodes", HTMLOListElement);
  #shown = "";

  show({ nodes, layers }: ChainInfo): void {
    const shown = JSON.stringify([nodes, layers]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const reached = nodes.at(-1)?.end === layers;
    const isReady = reached && nodes.every(({ ready }) => ready);
    this.#state(isReady, summaryOf(nodes, isReady, reached));
    this.#strip.replaceChildren(...nodes.map(segmentOf));
    this.#nodes.replaceChildren(...nodes.map(rowOf));
  }

  /** It could not be asked. */
  showProblem(problem: string): void {
    this.#shown = "";
    this.#state(false, problem);
  }

  #state(isReady: boolean, text: string): void {
    this.#light.dataset["state"] = isReady ? "ready" : "waiting";
    setText(this.#summary, text);
  }
}

function summaryOf(nodes: readonly ChainNode[], isReady: boolean, reached: boolean): string {
  const count = plural(nodes.length, "node");
  if (isReady) {
    const speed = Math.min(...nodes.map((node) => node.tokens_per_second ?? 0)); // what went through all of them
    return `${count} ready · ${speed.toFixed(1)} tokens/s`;
  }
  const silent = nodes.find(({ node }) => node === null);
  if (silent) return `${count} · ${layersOf(silent)} silent`;
  return reached ? `${count} · not ready` : `${count} · the last layers are missing`;
}

function segmentOf(node: ChainNode): HTMLElement {
  const segment = make("span", "segment", node.end === null ? "?" : layerNumbers(node.start, node.end));
  segment.style.flexGrow = String((node.end ?? node.start + 1) - node.start);
  segment.dataset["state"] = stateOf(node);
  return segment;
}

function rowOf(node: ChainNode): HTMLElement {
  const { device, quantization, sessions, tokens_per_second: speed, problem } = node;
  const facts = [
    device,
    quantization,
    sessions === null ? null : plural(sessions, "session"),
    speed === null ? null : `${speed.toFixed(1)} tokens/s`,
  ].filter((fact) => fact !== null);
  const light = make("span", "light");
  light.dataset["state"] = stateOf(node);
  const name = make("strong", "", layersOf(node));
  const state = { ready: "ready", waiting: "not ready", silent: "does not answer" }[stateOf(node)];
  const row = make("li", "", light, name, ` ${state}`, make("span", "facts", facts.join(" · ")));
  if (problem !== null) row.append(make("span", "problem", problem));
  return row;
}

const stateOf = ({ node, ready }: ChainNode): "ready" | "waiting" | "silent" =>
  node === null ? "silent" : ready ? "ready" : "waiting";

const layersOf = ({ start, end }: ChainNode): string =>
  end === null ? `Layers from ${start}` : `Layer${end - start === 1 ? "" : "s"} ${layerNumbers(start, end)}`;

/** `[start, end)` as people count: the last one is part of it. */
const layerNumbers = (start: number, end: number): string => (end - start === 1 ? `${start}` : `${start}–${end - 1}`);

const plural = (count: number, word: string): string => `${count} ${word}${count === 1 ? "" : "s"}`;
