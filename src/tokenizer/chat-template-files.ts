import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { messageOf, UserError } from "../base/errors.ts";

export interface ChatTemplateFiles {
  /** By name; the ordinary one is `default`. Empty: the model has none. */
  readonly templates: ReadonlyMap<string, string>;
  /** `bos_token` and the like, as text: variables of every template. */
  readonly specialTokens: Readonly<Record<string, string>>;
}

/**
 * The chat templates of a model's directory as transformers finds them: `chat_template.jinja` and
 * `additional_chat_templates/*.jinja` before the `chat_template` of tokenizer_config.json, which is one text or a list of
 * `{name, template}`. Throws UserError `bad_model` that names the file it could not read.
 */
export function readChatTemplates(directory: string): ChatTemplateFiles {
  const config = readConfig(directory);
  const files = templateFiles(directory);
  return { templates: files.size > 0 ? files : ofConfig(directory, config), specialTokens: specialTokensOf(config) };
}

/** No template comes near. */
const MOST_BYTES = 4 * 2 ** 20;

function templateFiles(directory: string): Map<string, string> {
  const templates = new Map<string, string>();
  const single = join(directory, "chat_template.jinja");
  if (existsSync(single)) templates.set("default", read(single));
  const folder = join(directory, "additional_chat_templates");
  if (!existsSync(folder)) return templates;
  for (const name of readdirSync(folder).toSorted()) {
    if (name.endsWith(".jinja")) templates.set(name.slice(0, -".jinja".length), read(join(folder, name)));
  }
  return templates;
}

function ofConfig(directory: string, config: Record<string, unknown>): Map<string, string> {
  const field = config["chat_template"];
  if (field === undefined || field === null) return new Map();
  if (typeof field === "string") return new Map([["default", field]]);
  const isNamed = (item: unknown): item is { name: string; template: string } => {
    const { name, template } = (item ?? {}) as Record<string, unknown>;
    return typeof name === "string" && typeof template === "string";
  };
  if (Array.isArray(field) && field.every(isNamed)) return new Map(field.map(({ name, template }) => [name, template]));
  const path = join(directory, "tokenizer_config.json");
  throw unreadable(path, "its chat_template is neither a text nor a list of {name, template}");
}

const NAMES = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"].map((name) => `${name}_token`);

function specialTokensOf(config: Record<string, unknown>): Record<string, string> {
  return Object.fromEntries(
    NAMES.flatMap((name) => {
      const field = config[name];
      const content = typeof field === "object" && field !== null && "content" in field ? field.content : field;
      return typeof content === "string" ? [[name, content]] : [];
    }),
  );
}

function readConfig(directory: string): Record<string, unknown> {
  const path = join(directory, "tokenizer_config.json");
  if (!existsSync(path)) return {};
  try {
    const config: unknown = JSON.parse(read(path));
    if (typeof config === "object" && config !== null && !Array.isArray(config))
      return config as Record<string, unknown>;
  } catch (cause) {
    if (cause instanceof SyntaxError) throw unreadable(path, `it is not valid JSON: ${messageOf(cause)}`, cause);
    throw cause;
  }
  throw unreadable(path, "it is not a JSON object");
}

function read(path: string): string {
  try {
    const status = statSync(path);
    if (!status.isFile()) throw new Error("it is not a file");
    if (status.size > MOST_BYTES) throw new Error(`it has ${status.size} bytes, and at most ${MOST_BYTES} are read`);
    return readFileSync(path, "utf8");
  } catch (cause) {
    throw unreadable(path, messageOf(cause), cause);
  }
}

const unreadable = (path: string, problem: string, cause?: unknown): UserError =>
  new UserError("bad_model", `${path} cannot be used: ${problem}`, "fetch the model again, or correct the file", {
    cause,
  });
