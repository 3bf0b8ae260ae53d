import type { ArgsDef } from "citty";
import { UserError } from "../base/errors.ts";
import { type Compared, type EncodingReport, type JudgedQuality, type Verification, verify } from "../server/verify.ts";
import { defineCommand } from "./command.ts";
import { hubFlags, logFlags, loggerOf, wholeNumber, wordList } from "./flags.ts";
import { showDownload } from "./progress.ts";

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
  text: { type: "string", valueHint: "FILE", description: "What the model reads (default: a few built-in paragraphs)" },
  device: {
    type: "string",
    default: "auto",
    valueHint: "auto|cpu|NAME",
    description: "The adapter: any, a software one, or a part of its name",
  },
  "max-context": {
    type: "string",
    valueHint: "T",
    description: "The longest sequence, in tokens (default: 256, or what the model has)",
  },
  ...hubFlags,
  json: { type: "boolean", default: false, description: "Print the result as JSON (docs/verify.md)" },
  ...logFlags,
} satisfies ArgsDef;

/** `meshnet verify`: what an encoding costs a model, and whether this machine computes as it should. */
export const verifyCommand = defineCommand({
  name: "verify",
  description: "Compare a model's encodings with bfloat16, on this machine",
  args: flags,
  examples: [
    "meshnet verify --model-id openai-community/gpt2",
    "meshnet verify --model-id ./gpt2 --quantization nf4 --text letters.txt --device cpu",
  ],
  async run(args) {
    const log = loggerOf(args);
    const config = {
      modelId: args["model-id"],
      revision: args.revision,
      compared: comparedOf(args.quantization, args["int8-activations"]),
      text: args.text,
      device: args.device,
      maxContext: wholeNumber("max-context", args["max-context"], 2),
      offline: args.offline,
      cacheDir: args["cache-dir"],
    };
    const progress = showDownload({ log, format: args["log-format"] as "text" | "json" });
    const result = await verify(config, { log, env: process.env, progress });
    console.log(args.json ? JSON.stringify(result, undefined, 2) : describe(result));
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

function describe({ model, device, text, cut, encodings, problems, ok }: Verification): string {
  const { tokens, sequences, predicted } = text;
  const lines = [
    ["model", `${model.id} (${model.type}, ${model.layers} layers, ${count(model.parameters)} parameters)`],
    ["device", `${device.name}, ${device.driver}`],
    ["text", `${text.source}: ${tokens} tokens in ${sequences} sequences, ${predicted} of them predicted`],
    ["method", "all layers in each encoding, one after another; logits of every token against those of bfloat16"],
  ].map(([name, value]) => `${name!.padEnd(10)} ${value}`);
  const verdict = ok
    ? "within the bounds"
    : ["not within the bounds:", ...problems.map((one) => `  ${one}`)].join("\n");
  const table = encodings.length > 0 ? ["", ...tableOf(encodings, cut), ""] : [];
  return [...lines, ...table, `${"verdict".padEnd(10)} ${verdict}`].join("\n");
}

type Cell = (encoding: EncodingReport) => string;

/** A column for each encoding; in brackets the bounds. */
function tableOf(encodings: readonly EncodingReport[], cut: number | null): string[] {
  const rows: readonly [name: string, cell: Cell][] = [
    ["", ({ name }) => name],
    ["bytes per parameter, quantized layers", ({ bytesPerParameter }) => bytesPerParameter.quantized.toFixed(4)],
    ["bytes per parameter, whole model", ({ bytesPerParameter }) => bytesPerParameter.model.toFixed(4)],
    ["rms logit error", ({ quality }) => quality?.rmsError.toPrecision(3) ?? "-"],
    ["max logit error", ({ quality }) => quality?.maxError.toPrecision(3) ?? "-"],
    ["relative rms error", judged("relativeRms", "≤")],
    ["KL divergence, nats", judged("klDivergence", "≤")],
    ["top-1 agreement", ({ quality }) => quality?.top1Agreement.toPrecision(3) ?? "-"],
    ["top-1 agreement, bfloat16 sure", judged("sureAgreement", "≥")],
    ["perplexity", ({ perplexity }) => perplexity.toPrecision(5)],
    ["perplexity over bfloat16's", judged("perplexityRatio", "≤")],
    ["two runs", ({ sameTwice }) => (sameTwice ? "same bits" : "OTHER BITS")],
    [
      cut === null ? "cut in two" : `cut at layer ${cut}`,
      ({ sameCut }) => (sameCut === null ? "-" : sameCut ? "same bits" : "OTHER BITS"),
    ],
  ];
  return rows.map(([name, cell]) =>
    [name.padEnd(38), ...encodings.map((one) => cell(one).padEnd(19))].join(" ").trimEnd(),
  );
}

const judged =
  (name: JudgedQuality, sign: string): Cell =>
  ({ quality, bounds }) =>
    quality && bounds ? `${quality[name]?.toPrecision(3) ?? "none"} (${sign} ${bounds[name]})` : "-";

const count = (values: number): string =>
  values < 1e6 ? `${(values / 1e3).toFixed(0)} thousand` : `${(values / 1e6).toFixed(values < 1e7 ? 1 : 0)} million`;
