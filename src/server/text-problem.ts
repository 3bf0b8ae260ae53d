import { UserError } from "../base/errors.ts";
import type { Snapshot } from "../hub/snapshot.ts";
import { loadTokenizer } from "../tokenizer/tokenizer.ts";
import { loadTextModel } from "./openai/text-model.ts";

/** A head reads and writes text: what `startNode` would throw where the model has nothing for that. */
export async function textProblem(snapshot: Snapshot): Promise<UserError | undefined> {
  try {
    loadTextModel(snapshot, await loadTokenizer(snapshot.directory));
    return undefined;
  } catch (error) {
    if (error instanceof UserError) return error;
    throw error;
  }
}
