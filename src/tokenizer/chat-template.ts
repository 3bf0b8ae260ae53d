import { messageOf, UserError } from "../base/errors.ts";
import { readChatTemplates } from "./chat-template-files.ts";
import type { ChatMessage } from "./chat-messages.ts";
import { JinjaTemplate, RENDER_LIMITS, type RenderLimits, TemplateLimit, TemplateRefusal } from "./jinja.ts";
import { SpellingMask, unusedCharacter } from "./spelled-tokens.ts";
import type { Tokenizer } from "./tokenizer.ts";

export interface ChatOptions {
  /** JSON schemas of functions. */
  readonly tools?: readonly unknown[];
  /** End with the beginning of the assistant's answer. Default: true. */
  readonly addGenerationPrompt?: boolean;
  /** More variables for the template (`enable_thinking`). */
  readonly variables?: Readonly<Record<string, unknown>>;
  /** What `strftime_now` tells. */
  readonly now?: Date;
}

export interface RenderedChat {
  readonly text: string;
  /** As transformers' `apply_chat_template` gives them, but for special tokens that a message spells: those are text. */
  readonly ids: number[];
}

/**
 * A model's way to write conversations. All methods throw UserError: `impossible` with the template's own words where it
 * refuses the conversation, `not_supported` where it does what is not possible here, or too much of it.
 */
export class ChatTemplate {
  readonly #sources: ReadonlyMap<string, string>;
  readonly #specialTokens: Readonly<Record<string, string>>;
  readonly #parsed = new Map<string, JinjaTemplate>();

  private constructor(
    directory: string,
    readonly tokenizer: Tokenizer,
    readonly limits: RenderLimits,
  ) {
    const { templates, specialTokens } = readChatTemplates(directory);
    this.#sources = templates;
    this.#specialTokens = specialTokens;
  }

  /** Of a model's directory. Undefined where the model has none: `noChatTemplate` says so to who asks for a chat. */
  static load(directory: string, tokenizer: Tokenizer, limits = RENDER_LIMITS): ChatTemplate | undefined {
    const template = new ChatTemplate(directory, tokenizer, limits);
    return template.#sources.size > 0 ? template : undefined;
  }

  /** The conversation as text, special tokens as they are spelled. */
  render(messages: readonly ChatMessage[], options: ChatOptions = {}): string {
    const source = this.#sourceFor(options);
    return this.#render(source, inShapeFor(source, messages), options);
  }

  /**
   * The conversation as text and token ids.
   *
   * Where a message spells a special token (or, unless it is the assistant's, any added token that the template's source
   * has), the template is rendered a second time with these spellings masked. The tokens that are in both renderings are
   * the template's own; whatever a message spells is encoded as ordinary text, and forges nothing.
   */
  encode(messages: readonly ChatMessage[], options: ChatOptions = {}): RenderedChat {
    const source = this.#sourceFor(options);
    const shaped = inShapeFor(source, messages);
    const text = this.#render(source, shaped, options);
    const masks = this.#masks(source, [text, JSON.stringify([shaped, options.tools, options.variables])]);
    const masked = shaped.map((message) => (message.role === "assistant" ? masks.answers : masks.others).deep(message));
    const { tools, variables } = masks.answers.deep({ tools: options.tools, variables: options.variables });
    if (masks.others.isUsed || masks.answers.isUsed) {
      const maskedText = this.#render(source, masked, { ...options, tools, variables });
      const { mask, tokens } = masks.others;
      const bare = masks.others.unmask(maskedText);
      // Nothing may be spelled after all: the mask stood beside a lone "<", say.
      const isHarmless = bare === text && masks.others.spelled(maskedText).length === masks.others.spelled(text).length;
      if (!isHarmless) return { text: bare, ids: this.tokenizer.encodeMasked(maskedText, mask, new Set(tokens)) };
    }
    return { text, ids: this.tokenizer.encode(text, { addSpecialTokens: false }) };
  }

  /** What is masked in an assistant's messages, and in all others. */
  #masks(source: string, texts: readonly string[]): { answers: SpellingMask; others: SpellingMask } {
    const { addedTokens } = this.tokenizer;
    const isMarker = (content: string) => content.trim() !== "" && source.includes(content);
    const special = addedTokens.filter((token) => token.special).map(({ content }) => content);
    const markers = addedTokens
      .filter((token) => !token.special && isMarker(token.content))
      .map(({ content }) => content);
    const mask = unusedCharacter([source, ...texts]);
    return { answers: new SpellingMask(special, mask), others: new SpellingMask([...special, ...markers], mask) };
  }

  #sourceFor({ tools }: ChatOptions): string {
    const named = tools && tools.length > 0 ? this.#sources.get("tool_use") : undefined;
    const source = named ?? this.#sources.get("default");
    if (source !== undefined) return source;
    throw new UserError(
      "not_supported",
      `this model has the chat templates ${[...this.#sources.keys()].join(", ")}, and none is the default`,
      "name one of them default in tokenizer_config.json",
    );
  }

  #render(source: string, messages: readonly ChatMessage[], options: ChatOptions): string {
    const { tools, addGenerationPrompt = true, variables, now = new Date() } = options;
    const all = {
      ...this.#specialTokens,
      ...variables,
      messages,
      tools: tools && tools.length > 0 ? tools : null,
      documents: null,
      add_generation_prompt: addGenerationPrompt,
    };
    try {
      let template = this.#parsed.get(source);
      if (!template) this.#parsed.set(source, (template = new JinjaTemplate(source)));
      return template.render(all, now, this.limits);
    } catch (cause) {
      throw told(cause);
    }
  }
}

/** What to throw where a chat is asked of a model without a template. */
export const noChatTemplate = (modelId: string): UserError =>
  new UserError(
    "not_supported",
    `${modelId} has no chat template, so it does not know how a conversation is written`,
    "ask for completions of a text that you write out yourself (/v1/completions), or put a chat_template.jinja into the model's directory",
  );

/** Templates that do not go through the parts of a message get one text, its parts on lines of their own. */
function inShapeFor(source: string, messages: readonly ChatMessage[]): readonly ChatMessage[] {
  if (/\bin\s+[\w.[\]'"]*\bcontent\b/.test(source)) return messages;
  return messages.map((message) => {
    if (typeof message.content === "string" || message.content === null) return message;
    return { ...message, content: message.content.map(({ text }) => text).join("\n") };
  });
}

function told(cause: unknown): unknown {
  if (cause instanceof TemplateRefusal) {
    const hint = "change the messages as the model's chat template wants them";
    return new UserError("impossible", `the chat template refuses this conversation: ${cause.message}`, hint, {
      cause,
    });
  }
  const problem = cause instanceof TemplateLimit ? "takes too much" : "failed";
  return new UserError(
    "not_supported",
    `the model's chat template ${problem}: ${messageOf(cause)}`,
    "change the messages, or ask for completions of a text that you write out yourself (/v1/completions)",
    { cause },
  );
}
