import { inDigits } from "../base/digits.ts";
import type { JudgedQuality } from "../server/logit-quality.ts";
import type {
  EncodingReport,
  LayerReport,
  ReferenceEncoding,
  ReferenceVerification,
  Verification,
} from "../server/verify/report.ts";

type Result = Verification | ReferenceVerification;

/** What `meshnet verify` prints. */
export function describeVerification(result: Result): string {
  const [how, table] = "reference" in result ? withReference(result) : withText(result);
  const { model, device, ok, problems } = result;
  const lines = [
    ["model", `${model.id} (${model.type}, ${model.layers} layers, ${count(model.parameters)} parameters)`],
    ["device", `${device.name}, ${device.driver}`],
    ...how,
  ].map(([name, value]) => `${name!.padEnd(10)} ${value}`);
  const verdict = ok
    ? "within the bounds"
    : ["not within the bounds:", ...problems.map((one) => `  ${one}`)].join("\n");
  return [...lines, ...table, `${"verdict".padEnd(10)} ${verdict}`].join("\n");
}

type Described = readonly [lines: [name: string, value: string][], table: string[]];

function withText({ text, cut, encodings }: Verification): Described {
  const { source, tokens, sequences, predicted } = text;
  const lines: [string, string][] = [
    ["text", `${source}: ${tokens} tokens in ${sequences} sequences, ${predicted} of them predicted`],
    ["method", "all layers in each encoding, one after another; logits of every token against those of bfloat16"],
  ];
  return [lines, encodings.length > 0 ? ["", ...tableOf(textRows(cut), encodings), ""] : []];
}

function withReference({ reference, layers, referenceQuality, encodings }: ReferenceVerification): Described {
  const { file, prompts } = reference;
  const lines: [string, string][] = [
    ["reference", `${file}: ${prompts.map(({ name, tokens }) => `${name} (${tokens} tokens)`).join(", ")}`],
    ["method", "bfloat16 cut after every layer, then each encoding, cut, whole and in pieces; against float32 there"],
  ];
  if (layers.length === 0) return [lines, []];
  const table = ["", ...layerTable(layers), ""];
  if (!referenceQuality) return [lines, table];
  const own = { name: "reference's bf16", quality: referenceQuality, bounds: null, sameCuts: null, samePieces: null };
  return [lines, [...table, ...tableOf(REFERENCE_ROWS, [own, ...encodings]), ""]];
}

/** A row for each place in the model. */
function layerTable(layers: readonly LayerReport[]): string[] {
  const rows = layers.map((layer) => [
    layer.name,
    inDigits(layer.relativeRms, 3),
    inDigits(layer.relativeNoise, 3),
    inDigits(layer.maxError, 3),
    inDigits(layer.maxNoise, 3),
    layer.toFloat32.toFixed(2),
    layer.toBfloat16.toFixed(2),
    layer.isWithin ? "" : "OUTSIDE",
  ]);
  const title = [
    "bfloat16 after",
    "relative rms",
    "its noise",
    "max error",
    "its noise",
    "to fp32 (≤ 1.5)",
    "to bf16 (≤ 2)",
  ];
  const width = Math.max(...layers.map(({ name }) => name.length), title[0]!.length);
  return [title, ...rows].map(([name, ...cells]) =>
    [name!.padEnd(width), ...cells.map((cell) => cell.padEnd(15))].join(" ").trimEnd(),
  );
}

type Row<T> = readonly [name: string, cell: (one: T) => string];

const REFERENCE_ROWS: readonly Row<Omit<ReferenceEncoding, "name"> & { readonly name: string }>[] = [
  ["logits", ({ name }) => name],
  ["rms error", ({ quality }) => inDigits(quality.rmsError, 3)],
  ["max error", ({ quality }) => inDigits(quality.maxError, 3)],
  ["relative rms error", ({ quality, bounds }) => bounded(quality.relativeRms, "≤", bounds?.relativeRms)],
  ["KL divergence, nats", ({ quality, bounds }) => bounded(quality.klDivergence, "≤", bounds?.klDivergence)],
  ["top-1 agreement", ({ quality }) => inDigits(quality.top1Agreement, 3)],
  [
    "top-1 agreement, float32 sure",
    ({ quality, bounds }) => bounded(quality.sureAgreement, "≥", bounds?.sureAgreement),
  ],
  ["cut after every layer", ({ sameCuts }) => bits(sameCuts)],
  ["prompts in pieces", ({ samePieces }) => bits(samePieces)],
];

const textRows = (cut: number | null): readonly Row<EncodingReport>[] => [
  ["", ({ name }) => name],
  ["bytes per parameter, quantized layers", ({ bytesPerParameter }) => bytesPerParameter.quantized.toFixed(4)],
  ["bytes per parameter, whole model", ({ bytesPerParameter }) => bytesPerParameter.model.toFixed(4)],
  ["rms logit error", ({ quality }) => (quality ? inDigits(quality.rmsError, 3) : "-")],
  ["max logit error", ({ quality }) => (quality ? inDigits(quality.maxError, 3) : "-")],
  ["relative rms error", judged("relativeRms", "≤")],
  ["KL divergence, nats", judged("klDivergence", "≤")],
  ["top-1 agreement", ({ quality }) => (quality ? inDigits(quality.top1Agreement, 3) : "-")],
  ["top-1 agreement, bfloat16 sure", judged("sureAgreement", "≥")],
  ["perplexity", ({ perplexity }) => inDigits(perplexity, 5)],
  ["perplexity over bfloat16's", judged("perplexityRatio", "≤")],
  ["two runs", ({ sameTwice }) => bits(sameTwice)],
  [cut === null ? "cut in two" : `cut at layer ${cut}`, ({ sameCut }) => bits(sameCut)],
];

const judged =
  (name: JudgedQuality, sign: string) =>
  ({ quality, bounds }: EncodingReport): string =>
    quality && bounds ? bounded(quality[name], sign, bounds[name]) : "-";

/** In brackets the bound, where there is one. */
function bounded(value: number | null, sign: string, bound: number | undefined): string {
  const text = value === null ? "none" : inDigits(value, 3);
  return bound === undefined ? text : `${text} (${sign} ${bound})`;
}

const bits = (same: boolean | null): string => (same === null ? "-" : same ? "same bits" : "OTHER BITS");

/** A column for each encoding. */
function tableOf<T>(rows: readonly Row<T>[], columns: readonly T[]): string[] {
  return rows.map(([name, cell]) =>
    [name.padEnd(38), ...columns.map((one) => cell(one).padEnd(19))].join(" ").trimEnd(),
  );
}

const count = (values: number): string =>
  values < 1e6 ? `${(values / 1e3).toFixed(0)} thousand` : `${(values / 1e6).toFixed(values < 1e7 ? 1 : 0)} million`;
