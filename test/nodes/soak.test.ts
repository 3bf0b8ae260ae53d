import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { TINY } from "../support/oracle.ts";
import { type NodeProcess, startChain } from "../support/meshnet.ts";
import { seededRandom } from "../support/safetensors.ts";

/** `SOAK_MINUTES` shortens it, to try the test itself. */
const MINUTES = Number(process.env.SOAK_MINUTES ?? 10);
const CLIENTS = 8;
/** What a process may hold more at the end than after the first third: its heap breathes. */
const GROWTH_BYTES = 48 << 20;
const PROMPTS = [
  "This program is",
  "The licenses for most",
  "You may convey",
  "If the work",
  "Each time",
  "Ein Wort: 字",
];
const MAX_TOKENS = 24;

test.skipIf(!process.env.LONG_TESTS)(
  `${MINUTES} minutes of mixed load lose and double no token, and leave memory as it was${process.env.LONG_TESTS ? "" : " (only in the long tests)"}`,
  async () => {
    await using chain = await startChain(TINY, [2, 4]);
    const client = new Client(chain.head);
    const alone = new Map<string, string>();
    for (const prompt of PROMPTS) alone.set(prompt, await client.whole(prompt));

    const counts = { whole: 0, streamed: 0, left: 0, stateless: 0, refused: 0 };
    const memory: number[][] = [];
    const end = performance.now() + MINUTES * 60_000;
    const clients = Array.from({ length: CLIENTS }, async (_, index) => {
      const random = seededRandom(index);
      while (performance.now() < end) {
        const prompt = PROMPTS[Math.floor(random() * PROMPTS.length)]!;
        const action = random();
        try {
          if (action < 0.35) {
            expect(await client.whole(prompt)).toBe(alone.get(prompt)!);
            counts.whole++;
          } else if (action < 0.7) {
            expect(await client.streamed(prompt)).toBe(alone.get(prompt)!);
            counts.streamed++;
          } else if (action < 0.9) {
            const text = await client.streamed(prompt, 1 + Math.floor(random() * 8));
            expect(alone.get(prompt)!.startsWith(text)).toBe(true);
            counts.left++;
          } else {
            expect(await client.stateless(prompt)).toBe(200);
            counts.stateless++;
          }
        } catch (error) {
          if (!(error instanceof NoRoom)) throw error;
          counts.refused++;
          await Bun.sleep(100);
        }
      }
    });
    const watch = (async () => {
      while (performance.now() < end) {
        memory.push(chain.nodes.map(residentBytes));
        await Bun.sleep(1_000);
      }
    })();
    await Promise.all([...clients, watch]);
    await Bun.sleep(1_500); // the sessions of those who left

    const third = Math.floor(memory.length / 3);
    const growth = chain.nodes.map((_, node) => {
      const series = memory.map((sample) => sample[node]!);
      return median(series.slice(-third)) - median(series.slice(third, 2 * third));
    });
    console.log(counts, { growthMiB: growth.map((bytes) => (bytes / 2 ** 20).toFixed(1)) });
    expect(Math.max(...growth)).toBeLessThan(GROWTH_BYTES);
    for (const node of chain.nodes) {
      const info = (await (await fetch(new URL("info", await node.url))).json()) as Info;
      expect(info.cache).toMatchObject({ sessions: 0, reserved_pages: 0 });
      expect(Math.abs(info.memory.allocated / info.memory.planned - 1)).toBeLessThan(0.02);
    }
    expect(Math.min(counts.whole, counts.streamed, counts.left, counts.stateless)).toBeGreaterThan(0);
  },
  MINUTES * 60_000 + 300_000,
);

interface Info {
  cache: { sessions: number; reserved_pages: number };
  memory: { planned: number; allocated: number };
}

class NoRoom extends Error {}

class Client {
  constructor(readonly head: string) {}

  async whole(prompt: string): Promise<string> {
    const reply = await this.#complete(prompt, false);
    const { choices } = (await reply.json()) as { choices: { text: string }[] };
    return choices[0]!.text;
  }

  /** The text so far, where the reader leaves after `events`. */
  async streamed(prompt: string, events = Infinity): Promise<string> {
    const leave = new AbortController();
    const reply = await this.#complete(prompt, true, leave.signal);
    let text = "";
    let rest = "";
    let seen = 0;
    let isDone = false;
    const decoder = new TextDecoder();
    const reader = reply.body!.getReader();
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      const lines = (rest + decoder.decode(read.value, { stream: true })).split("\n");
      rest = lines.pop()!;
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        isDone = line === "data: [DONE]";
        if (!isDone) text += (JSON.parse(line.slice(6)) as { choices: { text: string }[] }).choices[0]?.text ?? "";
        if (++seen >= events) {
          leave.abort();
          await reader.cancel().catch(() => {}); // it has been aborted
          return text;
        }
      }
    }
    expect(isDone).toBe(true);
    return text;
  }

  async stateless(prompt: string): Promise<number> {
    const body = JSON.stringify({ prompt });
    const headers = { "Content-Type": "application/json" };
    const reply = await fetch(new URL("forward", this.head), { method: "POST", headers, body });
    await reply.arrayBuffer();
    if (reply.status === 429) throw new NoRoom();
    return reply.status;
  }

  async #complete(prompt: string, stream: boolean, signal?: AbortSignal): Promise<Response> {
    const reply = await fetch(new URL("v1/completions", this.head), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: "gpt2-tiny", prompt, max_tokens: MAX_TOKENS, temperature: 0, stream }),
      signal,
    });
    if (reply.status === 429) throw new NoRoom();
    if (reply.status !== 200) throw new Error(`${reply.status}: ${await reply.text()}`);
    return reply;
  }
}

function residentBytes({ pid }: NodeProcess): number {
  const [, kilobytes] = /^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, "utf8")) ?? [];
  return Number(kilobytes) * 1024;
}

const median = (values: readonly number[]): number => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)]!;
