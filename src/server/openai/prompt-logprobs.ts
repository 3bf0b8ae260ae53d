import { randomBytes } from "node:crypto";
import { logprobsOf } from "../../engine/sampler.ts";
import type { Logprobs } from "../../protocol/reply.ts";
import { bf16ArrayToF32 } from "../../quant/bf16.ts";
import type { RowRunner } from "../rows.ts";

export interface PromptLogprobsOptions {
  readonly ids: Int32Array;
  /** Likeliest tokens to tell of, at each place. */
  readonly top: number;
  readonly runner: RowRunner;
  readonly signal: AbortSignal;
  readonly requestId: string;
}

/** Logits of so many bytes come at a time: what is done with them keeps nobody else waiting for long. */
const PART_BYTES = 1 << 20;

/**
 * What the model thinks of each token of a prompt, which begins with null: nothing came before it. The tokens are read in, in parts, in a
 * session of their own. Throws what `RowRunner.run` does.
 */
export async function promptLogprobs(options: PromptLogprobsOptions): Promise<(Logprobs | null)[]> {
  const { ids, top, runner, signal, requestId } = options;
  const { vocabSize } = runner.stage.info;
  const part = Math.max(1, Math.floor(PART_BYTES / 2 / vocabSize));
  const session = randomBytes(20).toString("base64url");
  const result: (Logprobs | null)[] = [null];
  try {
    for (let start = 0, step = 1; start < ids.length - 1; start += part, step++) {
      const input = { kind: "ids", ids: ids.subarray(start, Math.min(start + part, ids.length - 1)) } as const;
      const row = { session, step, positionStart: start, maxLen: ids.length - 1, input, want: "all_logits" } as const;
      const reply = await runner.run({ ...row, signal, requestId });
      if (reply.result.kind !== "all_logits") throw new Error(`the chain gives ${reply.result.kind}`);
      const logits = bf16ArrayToF32(reply.result.values);
      input.ids.forEach((_, i) => {
        result.push(logprobsOf(logits.subarray(i * vocabSize, (i + 1) * vocabSize), ids[start + i + 1]!, top));
      });
    }
    return result;
  } finally {
    runner.forgetSession(session);
  }
}
