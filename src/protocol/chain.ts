// Types only, and no imports: the page in the browser knows them too.

/** `GET /chain`: the node that is asked, and those after it, as each says itself. */
export interface ChainInfo {
  /** protocol version */
  readonly v: number;
  /** Of the whole model. */
  readonly layers: number;
  /** In the order of their layers. */
  readonly nodes: readonly ChainNode[];
}

export interface ChainNode {
  /** Instance id; null: it did not answer, and the fields below tell what is known of it. */
  readonly node: string | null;
  readonly start: number;
  readonly end: number | null;
  readonly device: string | null;
  readonly quantization: string | null;
  /** Open ones. */
  readonly sessions: number | null;
  /** That went through its layers, over the last few seconds. */
  readonly tokens_per_second: number | null;
  readonly ready: boolean;
  /** Why it is not ready. */
  readonly problem: string | null;
}
