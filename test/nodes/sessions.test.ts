import { describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { NodeProcess, startChain, takenPages } from "../support/meshnet.ts";
import { TINY } from "../support/oracle.ts";

const { greedy } = JSON.parse(readFileSync(join(TINY, "oracle.json"), "utf8"));
const NAMES = ["free", "patent", "convey"];
const TOKENS = 24;

interface TokenReply {
  readonly token_ids: [number];
  readonly text: [string];
  readonly prompt_token_ids?: [number[]];
  readonly error?: { readonly code: string; readonly cache_len?: number; readonly layers: string };
}

/** A client that keeps count of one session. */
class Client {
  held = 0;
  text = "";
  ids: number[] = [];
  #step = 0;

  constructor(
    readonly head: string,
    readonly session: string,
  ) {}

  async send(body: object, start: number): Promise<TokenReply> {
    const reply = await fetch(`${this.head}forward`, {
      method: "POST",
      headers: {
        "Content-Type": "application/json",
        "X-Meshnet-Session": this.session,
        "X-Meshnet-Step": String(this.#step++),
        "X-Meshnet-Pos-Start": String(start),
        "X-Meshnet-Max-Len": "96",
      },
      body: JSON.stringify(body),
    });
    const answer = (await reply.json()) as TokenReply;
    if (!reply.ok) return answer;
    this.ids.push(...(answer.prompt_token_ids?.[0] ?? []));
    this.held = this.ids.length;
    this.ids.push(answer.token_ids[0]);
    this.text += answer.text[0];
    return answer;
  }

  prompt = (text: string) => this.send({ prompt: text }, 0);
  next = () => this.send({ input_ids: [this.ids.slice(-1)] }, this.held);
  replay = () => this.send({ input_ids: [this.ids] }, 0);
  end = () => fetch(`${this.head}sessions/${this.session}`, { method: "DELETE" });
}

describe("sessions on nodes of the compiled binary", () => {
  test.each([[[4]], [[2, 4]], [[1, 3, 4]]])(
    "write transformers' texts side by side (cut at %j)",
    async (ends) => {
      await using chain = await startChain(TINY, ends);
      const clients = NAMES.map((name) => new Client(chain.head, name));
      await Promise.all(
        clients.map(async (client) => {
          await client.prompt(greedy.prompts[client.session]);
          for (let i = 1; i < TOKENS; i++) await client.next();
        }),
      );
      for (const { session, text } of clients) {
        const whole: string = greedy.continuations[`${session}.fp32`];
        expect({ session, text }).toEqual({ session, text: whole.slice(0, text.length) });
        expect(text.length).toBeGreaterThan(TOKENS);
      }
      expect(await takenPages(chain.nodes)).toEqual(ends.map(() => 3 * 3)); // 96 tokens in pages of 32
      expect((await Promise.all(clients.map((client) => client.end()))).map(({ status }) => status)).toEqual([
        204, 204, 204,
      ]);
      expect(await takenPages(chain.nodes)).toEqual(ends.map(() => 0));
    },
    120_000,
  );

  test("go on, with the same text, after a node was killed and started again: it says that it lost them", async () => {
    await using before = new NodeProcess(["--model-id", TINY, "--shard-start", "2"]);
    const tailUrl = await before.url;
    await using head = new NodeProcess(["--model-id", TINY, "--shard-end", "2", "--next", tailUrl]);
    const client = new Client(await head.ready(), "survivor");
    await client.prompt(greedy.prompts.free);
    for (let i = 0; i < 8; i++) await client.next();
    await before.stop("SIGKILL");
    const { port } = new URL(tailUrl);
    await using after = new NodeProcess(["--model-id", TINY, "--shard-start", "2", "--port", port]);
    await after.url;
    await head.ready();
    expect(await client.next()).toMatchObject({ error: { code: "session_lost", cache_len: 0, layers: "2-4" } });
    await client.replay();
    for (let i = 0; i < 8; i++) await client.next();
    const whole: string = greedy.continuations["free.fp32"];
    expect(client.text).toBe(whole.slice(0, client.text.length));
  }, 120_000);
});
