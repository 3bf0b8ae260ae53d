import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { loadTokenizer, type Tokenizer } from "../../src/tokenizer/tokenizer.ts";
import { type Chain, startChain } from "../support/meshnet.ts";
import { divergence, movedGaps, type Recorded, rmsOf, sha256OfWeights } from "./answers.ts";

interface Completion {
  choices: {
    text: string;
    logprobs: { tokens: string[]; token_logprobs: number[]; top_logprobs: Record<string, number>[] };
  }[];
  usage: { prompt_tokens: number; completion_tokens: number };
}

const directory = process.env.REAL_GEMMA3;
const file = join(import.meta.dir, "gemma3.json");
const recorded = JSON.parse(readFileSync(file, "utf8")) as Recorded<{ prompt: string }>;
const { gap_noise: noise } = recorded;
const prompts = Object.entries(recorded.answers);
const CHAIN_MS = 900_000;

const title = "Gemma-3-270M, split over two nodes of the compiled binary";
describe.skipIf(directory === undefined)(
  directory ? title : `${title} (not here: npm run test:real gemma3 fetches it)`,
  () => {
    const model = directory!;
    let tokenizer: Tokenizer;
    let chain: Chain;
    beforeAll(async () => {
      tokenizer = await loadTokenizer(model);
      const env = { MESHNET_MAX_CONTEXT: "64", MESHNET_MAX_SESSIONS: `${prompts.length}` };
      chain = await startChain(model, [7, 18], { env });
    }, CHAIN_MS);
    afterAll(() => chain?.[Symbol.asyncDispose](), CHAIN_MS);

    test("has the weights that transformers answered with, and its ids for odd texts", async () => {
      expect(await sha256OfWeights(model)).toBe(recorded.model_sha256);
      for (const [text, ids] of Object.entries(recorded.texts)) {
        expect({ text, ids: tokenizer.encode(text) }).toEqual({ text, ids });
      }
    });

    test(
      "goes on with ten texts as transformers does, until its two best tokens are too near",
      async () => {
        const began = performance.now();
        const replies = await Promise.all(prompts.map(([, { prompt }]) => complete(chain, prompt)));
        const seconds = (performance.now() - began) / 1000;
        const moved: number[] = [];
        let same = 0;
        for (const [index, [name, answer]] of prompts.entries()) {
          const { text, logprobs } = replies[index]!.choices[0]!;
          const tokens = logprobs.tokens.map((token, at) => ({
            token,
            logprob: logprobs.token_logprobs[at]!,
            top_logprobs: Object.entries(logprobs.top_logprobs[at]!).map(([other, logprob]) => ({
              token: other,
              logprob,
            })),
          }));
          console.log(`${name}: ${JSON.stringify(text)}`);
          const at = divergence(answer, tokens, tokenizer);
          const gap = answer.top2_gaps[at];
          if (gap === undefined) same++;
          expect({ name, at, gap, isNear: gap === undefined ? text === answer.text : gap <= noise.max }).toEqual({
            name,
            at,
            gap,
            isNear: true,
          });
          moved.push(...movedGaps(answer, tokens, tokenizer));
        }
        const total = replies.reduce((sum, { usage }) => sum + usage.completion_tokens, 0);
        console.log(`${same} of ${prompts.length} word for word; ${total} tokens in ${seconds.toFixed(1)} s`);
        console.log(
          `gaps of ${moved.length} tokens moved by ${rmsOf(moved).toFixed(4)}, transformers' own by ${noise.rms}`,
        );
        expect(same).toBeGreaterThanOrEqual(5);
        expect(rmsOf(moved)).toBeLessThanOrEqual(1.5 * noise.rms);
      },
      CHAIN_MS,
    );
  },
);

async function complete(chain: Chain, prompt: string): Promise<Completion> {
  const body = { prompt, temperature: 0, max_tokens: recorded.new_tokens, logprobs: 5 };
  const reply = await fetch(`${chain.head}v1/completions`, { method: "POST", body: JSON.stringify(body) });
  const text = await reply.text();
  if (!reply.ok) throw new Error(text);
  return JSON.parse(text) as Completion;
}
