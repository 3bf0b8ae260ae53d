import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { ChatTemplate } from "../../src/tokenizer/chat-template.ts";
import { loadTokenizer, type Tokenizer } from "../../src/tokenizer/tokenizer.ts";
import { type Chain, startChain } from "../support/meshnet.ts";
import { type AnsweredToken, divergence, movedGaps, type Recorded, rmsOf, sha256OfWeights } from "./answers.ts";

interface Chat {
  messages: { role: string; content: string }[];
  rendered: string;
}
interface ChatReply {
  choices: { message: { content: string }; logprobs: { content: AnsweredToken[] } | null }[];
  usage: { prompt_tokens: number; completion_tokens: number };
}

const directory = process.env.REAL_SMOLLM2;
const recorded = JSON.parse(readFileSync(join(import.meta.dir, "smollm2.json"), "utf8")) as Recorded<Chat>;
const conversations = Object.entries(recorded.answers);
const { gap_noise: noise } = recorded;
const LAYERS = 30;
const CHAIN_MS = 900_000;

const title = "SmolLM2-135M-Instruct, split over nodes of the compiled binary";
describe.skipIf(directory === undefined)(
  directory ? title : `${title} (not here: npm run test:real fetches it)`,
  () => {
    const model = directory!;
    let tokenizer: Tokenizer;
    beforeAll(async () => void (tokenizer = await loadTokenizer(model)));

    test("has the weights that transformers answered with", async () => {
      expect(await sha256OfWeights(model)).toBe(recorded.model_sha256);
    });

    test("has transformers' ids for odd texts, digits one by one", () => {
      for (const [text, ids] of Object.entries(recorded.texts)) {
        expect({ text, ids: tokenizer.encode(text) }).toEqual({ text, ids });
      }
    });

    test("has transformers' text and ids for every conversation", () => {
      const template = ChatTemplate.load(model, tokenizer)!;
      for (const [name, { messages, rendered, prompt_ids }] of conversations) {
        expect({ name, ...template.encode(messages) }).toEqual({ name, text: rendered, ids: prompt_ids });
      }
    });

    const answers = new Map<string, string>();

    describe("over two nodes", () => {
      let chain: Chain;
      beforeAll(async () => void (chain = await startNodes(model, [13, LAYERS])), CHAIN_MS);
      afterAll(() => chain?.[Symbol.asyncDispose](), CHAIN_MS);

      test(
        "answers ten conversations at once as transformers does, until its two best tokens are too near",
        async () => {
          const began = performance.now();
          const replies = await chatAll(chain, true);
          const seconds = (performance.now() - began) / 1000;
          const moved: number[] = [];
          for (const [index, [name, recording]] of conversations.entries()) {
            const { message, logprobs } = replies[index]!.choices[0]!;
            const { prompt_tokens } = replies[index]!.usage;
            answers.set(name, message.content);
            expect({ name, prompt_tokens }).toEqual({ name, prompt_tokens: recording.prompt_ids.length });
            const at = divergence(recording, logprobs!.content, tokenizer);
            const gap = recording.top2_gaps[at];
            if (gap !== undefined) {
              console.log(`${name}, transformers: ${JSON.stringify(recording.text)}, a gap of ${gap} at token ${at}`);
              expect({ name, at, gap, isNear: gap <= noise.max }).toEqual({ name, at, gap, isNear: true });
            } else {
              expect({ name, text: message.content }).toEqual({ name, text: recording.text });
            }
            console.log(`${name}: ${JSON.stringify(message.content)}`);
            moved.push(...movedGaps(recording, logprobs!.content, tokenizer));
          }
          const same = conversations.filter(([name, { text }]) => answers.get(name) === text).length;
          const rms = rmsOf(moved);
          const tokens = replies.reduce((sum, { usage }) => sum + usage.completion_tokens, 0);
          console.log(`${same} of ${conversations.length} word for word; ${tokens} tokens in ${seconds.toFixed(1)} s`);
          console.log(`gaps of ${moved.length} tokens moved by ${rms.toFixed(4)}, transformers' own by ${noise.rms}`);
          expect(same).toBeGreaterThanOrEqual(5);
          // The gate of the other oracles: as near to float32 as 1.5 times what bfloat16 costs transformers.
          expect(rms).toBeLessThanOrEqual(1.5 * noise.rms);
        },
        CHAIN_MS,
      );
    });

    describe("over three nodes", () => {
      let chain: Chain;
      beforeAll(async () => void (chain = await startNodes(model, [4, 21, LAYERS])), CHAIN_MS);
      afterAll(() => chain?.[Symbol.asyncDispose](), CHAIN_MS);

      test(
        "answers word for word as over two",
        async () => {
          const replies = await chatAll(chain, false);
          const texts = conversations.map(([name], index) => [name, replies[index]!.choices[0]!.message.content]);
          expect(texts).toEqual([...answers]);
        },
        CHAIN_MS,
      );
    });
  },
);

const startNodes = (model: string, ends: number[]): Promise<Chain> =>
  startChain(model, ends, { env: { MESHNET_MAX_CONTEXT: "256", MESHNET_MAX_SESSIONS: `${conversations.length}` } });

const chatAll = (chain: Chain, logprobs: boolean): Promise<ChatReply[]> =>
  Promise.all(
    conversations.map(async ([, { messages }]) => {
      const body = {
        messages,
        temperature: 0,
        max_tokens: recorded.new_tokens,
        logprobs,
        ...(logprobs && { top_logprobs: 5 }),
      };
      const reply = await fetch(`${chain.head}v1/chat/completions`, { method: "POST", body: JSON.stringify(body) });
      const text = await reply.text();
      if (!reply.ok) throw new Error(text);
      return JSON.parse(text) as ChatReply;
    }),
  );
