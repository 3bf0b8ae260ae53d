import { existsSync } from "node:fs";
import { join } from "node:path";

/** The compiled binary, as people run it. */
export const MESHNET = join(import.meta.dir, "../../dist/meshnet");
if (!existsSync(MESHNET))
  throw new Error("dist/meshnet is missing: `npm run build` makes it, and `npm test` does so first");

const READY_MS = 120_000;

export interface RunOptions {
  cwd?: string;
  env?: Record<string, string>;
  /** A command in front of the binary, e.g. one that changes what the process sees. */
  wrapper?: string[];
  /** What it reads; default nothing. */
  stdin?: Blob;
}

export interface Finished {
  code: number;
  stdout: string;
  stderr: string;
}

/** Runs the binary to its end, from a folder that is not the repository's. */
export async function run(words: string[], options: RunOptions = {}): Promise<Finished> {
  const child = spawn(words, options);
  const [stdout, stderr] = await Promise.all([new Response(child.stdout).text(), new Response(child.stderr).text()]);
  return { code: await child.exited, stdout, stderr };
}

/** A node in a process of its own. */
export class NodeProcess implements AsyncDisposable {
  readonly #child: ReturnType<typeof spawn>;
  readonly #url = Promise.withResolvers<string>();
  log = "";

  constructor(flags: string[], options: RunOptions = {}) {
    this.#child = spawn(["node", ...(flags.includes("--port") ? [] : ["--port", "0"]), ...flags], options);
    this.#url.promise.catch(() => {});
    void this.#follow();
  }

  /** Resolves when it listens; rejects with its log when it ends instead. */
  get url(): Promise<string> {
    return this.#url.promise;
  }

  get pid(): number {
    return this.#child.pid;
  }

  get exited(): Promise<number> {
    return this.#child.exited;
  }

  async ready(): Promise<string> {
    const url = await this.url;
    const end = performance.now() + READY_MS;
    while (performance.now() < end) {
      if ((await fetch(`${url}health/ready`)).ok) return url;
      await Bun.sleep(50);
    }
    throw new Error(`not ready within ${READY_MS / 1000} s:\n${this.log}`);
  }

  async stop(signal: NodeJS.Signals = "SIGTERM"): Promise<number> {
    this.#child.kill(signal);
    return this.exited;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop("SIGKILL");
  }

  async #follow(): Promise<void> {
    for await (const chunk of this.#child.stderr.pipeThrough(new TextDecoderStream())) {
      this.log += chunk;
      const [, url] = / listening url=(\S+)/.exec(this.log) ?? [];
      if (url) this.#url.resolve(url);
    }
    this.#url.reject(new Error(`the node ended before it listened:\n${this.log}`));
  }
}

export interface Chain extends AsyncDisposable {
  readonly nodes: readonly NodeProcess[];
  /** URL of the head. */
  readonly head: string;
}

/** Nodes for `model` cut at `ends`, started from the tail to the head; resolves when the head is ready. */
export async function startChain(model: string, ends: number[], options: RunOptions = {}): Promise<Chain> {
  const nodes: NodeProcess[] = [];
  const stop = async () => void (await Promise.all(nodes.map((node) => node.stop("SIGKILL"))));
  try {
    let next: string[] = [];
    for (const [index, end] of [...ends.entries()].reverse()) {
      const start = ends[index - 1] ?? 0;
      const node = new NodeProcess(
        ["--model-id", model, "--shard-start", `${start}`, "--shard-end", `${end}`, ...next],
        options,
      );
      nodes.unshift(node);
      next = ["--next", await node.url];
    }
    return { nodes, head: await nodes[0]!.ready(), [Symbol.asyncDispose]: stop };
  } catch (error) {
    await stop();
    throw error;
  }
}

export function spawn(words: string[], { cwd = "/", env = {}, wrapper = [], stdin }: RunOptions = {}) {
  return Bun.spawn([...wrapper, MESHNET, ...words], {
    cwd,
    env: { PATH: process.env.PATH, HOME: process.env.HOME, ...env },
    stdio: [stdin ?? "ignore", "pipe", "pipe"],
  });
}

/** Pages that sessions have taken, on each node. */
export async function takenPages(nodes: readonly NodeProcess[]): Promise<number[]> {
  const taken = async (node: NodeProcess) => {
    const info = (await (await fetch(`${await node.url}info`)).json()) as { cache: { reserved_pages: number } };
    return info.cache.reserved_pages;
  };
  return Promise.all(nodes.map(taken));
}

/** Milliseconds until no session has room on any of the nodes. */
export async function untilFree(nodes: readonly NodeProcess[]): Promise<number> {
  const began = performance.now();
  while ((await takenPages(nodes)).some((pages) => pages > 0)) await Bun.sleep(20);
  return performance.now() - began;
}
