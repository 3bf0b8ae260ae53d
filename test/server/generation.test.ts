import { afterEach, describe, expect, test } from "bun:test";
import { UserError } from "../../src/base/errors.ts";
import type { Step } from "../../src/engine/types.ts";
import { generateTokens, type GenerateTokensOptions, type MadeToken } from "../../src/server/generation.ts";
import { seeded } from "../protocol/seeded.ts";
import { gate, startChain, startNode, type TinyNode, type TinyNodeOptions, until } from "./tiny-node.ts";
import { continued, tokenAfter } from "./tiny-stage.ts";

const running: TinyNode[] = [];
afterEach(async () => {
  await Promise.all(running.splice(0).map((node) => node.stop()));
});
async function start(options: TinyNodeOptions): Promise<TinyNode> {
  const node = await startNode(options);
  running.push(node);
  return node;
}
async function chainOf(cuts: readonly number[], options: Partial<TinyNodeOptions> = {}): Promise<TinyNode[]> {
  const nodes = await startChain(cuts, options);
  running.push(...nodes);
  return nodes;
}

const NEVER = new AbortController().signal;

function tokensOf(head: TinyNode, ids: readonly number[], options: Partial<GenerateTokensOptions> = {}) {
  return generateTokens({
    ids: Int32Array.from(ids),
    maxNewTokens: 8,
    signal: NEVER,
    runner: head.app.runner,
    ...options,
  });
}

async function all(tokens: AsyncIterable<MadeToken>): Promise<MadeToken[]> {
  return Array.fromAsync(tokens);
}
const idsOf = (tokens: readonly MadeToken[]) => tokens.map(({ id }) => id);

/** Within a second no node of the chain holds anything any more. */
async function expectNothingLeft(nodes: readonly TinyNode[]): Promise<void> {
  const began = performance.now();
  await until(() => nodes.every(({ stage, app }) => stage.cacheUse.reservedPages === 0 && app.runner.sessions === 0));
  expect(performance.now() - began).toBeLessThan(1000);
}

describe("generated tokens", () => {
  test.each([[[]], [[2]], [[1, 3]]])(
    "are those of the whole sequence, and nothing is left (cut at %j)",
    async (cuts) => {
      const nodes = await chainOf(cuts);
      const made = await all(tokensOf(nodes[0]!, [1, 2, 3]));
      expect(idsOf(made)).toEqual(continued([1, 2, 3], 8));
      expect(made.map(({ finish }) => finish)).toEqual([...Array(7).fill(null), "length"]);
      await expectNothingLeft(nodes);
    },
  );

  test("end with a token that stops: the model's, or the caller's", async () => {
    const [first, second, third] = continued([1, 2, 3], 3);
    const byModel = await start({ start: 0, end: 4, eosTokenIds: [third!] });
    expect(await all(tokensOf(byModel, [1, 2, 3]))).toEqual([
      { id: first!, finish: null },
      { id: second!, finish: null },
      { id: third!, finish: "stop" },
    ]);
    const made = await all(tokensOf(byModel, [1, 2, 3], { stopTokenIds: [second!] }));
    expect(made.at(-1)).toMatchObject({ id: second!, finish: "stop" });
    expect(made.length).toBe(2);
  });

  test("end where the context is full, with the last token that has room", async () => {
    const nodes = await chainOf([2]);
    const ids = Array.from({ length: 36 }, (_, i) => i);
    const made = await all(tokensOf(nodes[0]!, ids, { maxNewTokens: 100 }));
    expect(idsOf(made)).toEqual(continued(ids, 5)); // 40 are read in, and the 41st comes out
    expect(made.at(-1)!.finish).toBe("length");
    const tooLong = all(tokensOf(nodes[0]!, Array(41).fill(1)));
    await expect(tooLong).rejects.toMatchObject({ code: "context_exceeded" });
    await expect(all(tokensOf(nodes[0]!, []))).rejects.toMatchObject({ code: "empty_prompt" });
    expect(await all(tokensOf(nodes[0]!, [1], { maxNewTokens: 0 }))).toEqual([]);
    await expectNothingLeft(nodes);
  });

  test("of a long prompt are made after it was read in in parts", async () => {
    const passes: number[] = [];
    const refuse = ({ input, want }: Step) => {
      const tokens = input.kind === "ids" ? input.ids.length : input.hidden.length / 4;
      passes.push(want === "none" ? -tokens : tokens);
    };
    const node = await start({ start: 0, end: 4, refuse, maxContext: 2000 });
    const random = seeded(1);
    const ids = Array.from({ length: 1100 }, () => random(90));
    expect(idsOf(await all(tokensOf(node, ids, { maxNewTokens: 3 })))).toEqual(continued(ids, 3));
    expect(passes).toEqual([-512, -512, 76, 1, 1]);
  });

  test("that are drawn have one seed for all of them, and logprobs where they are asked for", async () => {
    const seeds = new Set<number | undefined>();
    const refuse = ({ sampling }: Step) => void (sampling && seeds.add(sampling.seed));
    const [head] = await chainOf([2], { refuse });
    const sampling = { temperature: 0.7, logprobs: 2 };
    const made = await all(tokensOf(head!, [1, 2], { sampling }));
    const [seed] = seeds;
    expect([...seeds]).toEqual([expect.any(Number)]);
    expect(idsOf(made)).toEqual(continued([1, 2], 8, seed));
    expect(made[0]!.logprobs!.top.length).toBe(2);
    const again = await all(tokensOf(head!, [1, 2], { sampling: { ...sampling, seed } }));
    expect(again).toEqual(made);
  });

  test("begin with what an earlier text left, where every node has it, and without where one has not", async () => {
    const [head, tail] = await chainOf([2]);
    const ids = Array.from({ length: 9 }, (_, i) => i + 1);
    await all(tokensOf(head!, ids, { maxNewTokens: 1 }));
    expect(idsOf(await all(tokensOf(head!, ids)))).toEqual(continued(ids, 8));
    expect([head!.stage.prefixTokens, tail!.stage.prefixTokens]).toEqual([8, 8]);
    tail!.stage.forgetPrefixes();
    expect(idsOf(await all(tokensOf(head!, ids)))).toEqual(continued(ids, 8));
    expect(tail!.stage.prefixTokens).toBe(8);
    await expectNothingLeft([head!, tail!]);
  });

  test("of many texts at once are those of each alone, and share passes and frames", async () => {
    const nodes = await chainOf([1, 3]);
    const prompts = Array.from({ length: 16 }, (_, i) => [i, 2 * i + 1, 7]);
    const made = await Promise.all(prompts.map((ids) => all(tokensOf(nodes[0]!, ids, { maxNewTokens: 12 }))));
    expect(made.map(idsOf)).toEqual(prompts.map((ids) => continued(ids, 12)));
    for (const { stage } of nodes) expect(stage.widest).toBe(16);
    expect(nodes[2]!.stage.calls).toBeLessThan((16 * 12) / 4);
    await expectNothingLeft(nodes);
  });
});

describe("a generation goes on", () => {
  test("when a node was started anew in the middle: the sequence is read in again, and the tokens are the same", async () => {
    let tail = await startNode({ start: 2, end: 4 });
    const head = await start({ start: 0, end: 2, next: tail.url });
    const made: number[] = [];
    for await (const { id } of tokensOf(head, [1, 2, 3], { maxNewTokens: 12 })) {
      made.push(id);
      if (made.length !== 4 && made.length !== 8) continue;
      await tail.stop();
      tail = await startNode({ start: 2, end: 4, port: tail.server.port });
    }
    running.push(tail);
    expect(made).toEqual(continued([1, 2, 3], 12));
    await expectNothingLeft([head, tail]);
  });

  test("but not for ever, when sessions are lost again and again", async () => {
    let losing = false;
    const lose = () => {
      if (losing) throw new UserError("session_lost", "gone", "replay", { details: { cache_len: 0 } });
    };
    const nodes = await chainOf([2], { refuse: lose });
    const tokens = tokensOf(nodes[0]!, [1, 2, 3]);
    await tokens.next();
    losing = true;
    await expect(tokens.next()).rejects.toMatchObject({ code: "session_lost" });
    losing = false;
    await expectNothingLeft(nodes);
  });
});

describe("a generation that ends early leaves nothing on any node", () => {
  test("when its reader stops", async () => {
    const nodes = await chainOf([1, 3]);
    for await (const { id } of tokensOf(nodes[0]!, [1, 2, 3])) if (id === tokenAfter([1, 2, 3])) break;
    await expectNothingLeft(nodes);
  });

  test.each([0, 1, 2])(
    "when its caller goes while it is read in, or while a token is made, on node %d",
    async (where) => {
      for (const phase of ["prefill", "decode"]) {
        let shut: ReturnType<typeof gate> | undefined = phase === "prefill" ? gate() : undefined;
        const gates = [0, 1, 2].map((node) => () => (node === where ? shut?.wait() : undefined));
        const tail = await start({ start: 3, end: 4, gate: gates[2], eager: true });
        const middle = await start({ start: 1, end: 3, gate: gates[1], next: tail.url, eager: true });
        const head = await start({ start: 0, end: 1, gate: gates[0], next: middle.url, eager: true });
        await until(() => head.admission!.refusal === undefined && middle.admission!.refusal === undefined);
        const nodes = [head, middle, tail];
        const gone = new AbortController();
        const tokens = tokensOf(head, [1, 2, 3], { signal: gone.signal });
        if (phase === "decode") {
          await tokens.next();
          shut = gate();
        }
        const next = tokens.next();
        await until(() => nodes[where]!.app.runner.busyMs > 5);
        gone.abort(new Error("the caller is gone"));
        await expect(next).rejects.toThrow("the caller is gone");
        // Its sessions are ended at once; the pass that runs still holds their room.
        await until(() => nodes.every(({ app }) => app.runner.sessions === 0));
        shut!.open();
        shut = undefined;
        await expectNothingLeft(nodes);
        await Promise.all(running.splice(0).map((node) => node.stop()));
      }
    },
  );

  test("when a node fails", async () => {
    let broken = false;
    const refuse = () => {
      if (broken) throw new UserError("device_lost", "gone", "restart");
    };
    const tail = await start({ start: 2, end: 4, refuse });
    const head = await start({ start: 0, end: 2, next: tail.url });
    const tokens = tokensOf(head, [1, 2, 3]);
    await tokens.next();
    broken = true;
    await expect(tokens.next()).rejects.toMatchObject({ status: 503 });
    await expectNothingLeft([head, tail]);
  });
});
