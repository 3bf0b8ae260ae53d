import type { Snapshot } from "../../hub/snapshot.ts";
import { type GenerationDefaults, generationDefaults } from "../../models/generation-config.ts";
import { ChatTemplate } from "../../tokenizer/chat-template.ts";
import type { Tokenizer } from "../../tokenizer/tokenizer.ts";
import { readJson } from "../plan-node.ts";

/** What a model says of texts, beside its weights. */
export interface TextModel {
  readonly defaults: GenerationDefaults;
  /** Undefined: the model has none, and there are no chats. */
  readonly chatTemplate?: ChatTemplate;
}

/** Of a model whose small files are here. Throws UserError `bad_model` that names the file it could not use. */
export function loadTextModel(snapshot: Snapshot, tokenizer: Tokenizer): TextModel {
  const name = "generation_config.json";
  const generation = snapshot.files.some((file) => file.name === name) ? readJson(snapshot, name) : undefined;
  return {
    defaults: generationDefaults(generation, readJson(snapshot, "config.json")),
    chatTemplate: ChatTemplate.load(snapshot.directory, tokenizer),
  };
}
