import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import type { Compared } from "../server/verify/encodings.ts";
import { verify } from "../server/verify/verify.ts";
import { defineCommand } from "./command.ts";
import { describeVerification } from "./describe-verify.ts";
import { hubFlags, logFlags, loggerOf, wholeNumber, wordList } from "./flags.ts";
import { showDownload } from "./progress.ts";
import { openResults } from "./stdout.ts";

const COMPARED = ["int8", "nf4"] as const;

const flags = {
  "model-id": {
    type: "string",
    required: true,
    valueHint: "ID|DIR",
    description: "A model on the Hugging Face Hub (openai-community/gpt2), or a directory that holds one",
  },
  quantization: {
    type: "string",
    default: COMPARED.join(","),
    valueHint: "Q,…",
    description: "The encodings that are compared with bfloat16",
  },
  "int8-activations": {
    type: "boolean",
    default: false,
    description: "Compare int8 with activations in INT8 too (exact LLM.int8()) as well",
  },
  reference: {
    type: "string",
    valueHint: "FILE",
    description:
      "What transformers computes of this model, layer by layer (default: reference.safetensors beside the weights, if it is there)",
  },
  text: {
    type: "string",
    valueHint: "FILE",
    description: "Without a reference: what the model reads (default: a few built-in paragraphs)",
  },
  device: {
    type: "string",
    default: "auto",
    valueHint: "auto|cpu|NAME",
    description: "The adapter: any, a software one, or a part of its name",
  },
  "max-context": {
    type: "string",
    valueHint: "T",
    description:
      "The longest sequence, in tokens (default: 256, or what the model has; with a reference its longest prompt)",
  },
  ...hubFlags,
  json: { type: "boolean", default: false, description: "Print the result as JSON (docs/verify.md)" },
  ...logFlags,
} satisfies ArgsDef;

/** `meshnet verify`: whether this machine computes a model as it should, and what an encoding costs it. */
export const verifyCommand = defineCommand({
  name: "verify",
  description: "Compare a model on this machine with a reference, or its encodings with bfloat16",
  args: flags,
  examples: [
    "meshnet verify --model-id openai-community/gpt2",
    "meshnet verify --model-id ./gpt2 --reference gpt2-reference.safetensors",
    "meshnet verify --model-id ./gpt2 --quantization nf4 --text letters.txt --device cpu",
  ],
  async run(args) {
    const log = loggerOf(args);
    const config = {
      modelId: args["model-id"],
      revision: args.revision,
      compared: comparedOf(args.quantization, args["int8-activations"]),
      reference: args.reference,
      text: args.text,
      device: args.device,
      maxContext: wholeNumber("max-context", args["max-context"], 2),
      offline: args.offline,
      cacheDir: args["cache-dir"],
    };
    const print = openResults();
    const progress = showDownload({ log, format: args["log-format"] as "text" | "json" });
    const result = await verify(config, { log, env: process.env, progress });
    await print(args.json ? JSON.stringify(result, undefined, 2) : describeVerification(result));
    return result.ok ? 0 : 1;
  },
});

function comparedOf(text: string, int8Activations: boolean): Compared[] {
  const words = wordList(text);
  const wrong = words.find((word) => !COMPARED.some((encoding) => encoding === word));
  if (wrong === undefined && words.length > 0) {
    const activations: readonly Compared[] = int8Activations ? ["int8-activations"] : [];
    return [...COMPARED.filter((encoding) => words.includes(encoding)), ...activations];
  }
  throw new UserError(
    "bad_usage",
    `--quantization ${wrong ?? "is empty"}: verify compares ${COMPARED.join(" and ")} with bfloat16`,
    `give one or both, as --quantization ${COMPARED.join(",")}`,
  );
}
