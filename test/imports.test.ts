import { describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { dirname, join, normalize, sep } from "node:path";

/** The house from top to bottom: imports go down, never up or sideways. */
const LEVELS = [
  ["index.ts"],
  ["cli"],
  ["server"],
  ["mesh", "ui"],
  ["engine"],
  ["weights"],
  ["models"],
  ["nn"],
  ["kernels"],
  ["gpu", "safetensors", "hub", "tokenizer", "quant", "protocol"], // six libraries that do not know each other
  ["base"],
];

/** Every arrow there is. A new one is a decision: it is written here by whoever draws it. */
const ARROWS: Record<string, string[]> = {
  "index.ts": ["cli"],
  cli: ["server", "mesh", "hub", "protocol", "base"],
  server: [
    "mesh",
    "ui",
    "engine",
    "weights",
    "models",
    "gpu",
    "safetensors",
    "hub",
    "tokenizer",
    "quant",
    "protocol",
    "base",
  ],
  mesh: ["protocol", "base"],
  ui: ["protocol"],
  engine: ["weights", "models", "nn", "kernels", "gpu", "quant", "protocol", "base"],
  weights: ["models", "nn", "kernels", "gpu", "safetensors", "quant", "base"],
  models: ["nn", "base"],
  nn: ["kernels", "gpu", "base"],
  kernels: ["gpu", "base"],
  gpu: ["base"],
  safetensors: ["base"],
  hub: ["base"],
  tokenizer: ["base"],
  quant: ["base"],
  protocol: ["safetensors", "base"],
};

/** The one arrow between two libraries: a message's tensors are described as a SafeTensors file describes its own. */
const SIDEWAYS = { from: "protocol", to: "safetensors", file: "safetensors/header.ts" };

/** Packages and other things outside src, each behind one folder. `node:` and `bun:` are everybody's. */
const OUTSIDE: Record<string, string[]> = {
  cli: ["citty", "package.json"],
  server: ["hono"],
  kernels: ["shaders"],
  gpu: ["webgpu", "dist"],
  hub: ["@huggingface/hub"],
  tokenizer: ["@huggingface/tokenizers", "@huggingface/jinja"],
};

const SOURCE = join(import.meta.dir, "../src");

interface Import {
  /** The importing file, below src. */
  file: string;
  /** As it is written there. */
  target: string;
  from: string;
  to: string;
  /** Whether `to` is a folder of src, not something outside. */
  isInside: boolean;
}

const IMPORTS: Import[] = readdirSync(SOURCE, { recursive: true, encoding: "utf8" })
  .filter((file) => file.endsWith(".ts") && !file.endsWith(".d.ts"))
  .toSorted()
  .flatMap((file) => importsOf(file, readFileSync(join(SOURCE, file), "utf8")))
  .filter(({ from, to, isInside }) => !isInside || from !== to);

describe("the drawing in ARCHITECTURE.md is true:", () => {
  test("every import between two folders is an arrow of the list", () => {
    expect(unlisted(inside(true), ARROWS)).toEqual([]);
  });

  test("every arrow of the list is an import", () => {
    expect(unused(inside(true), ARROWS)).toEqual([]);
  });

  test("every arrow goes down, but for one", () => {
    const level = (folder: string) => LEVELS.findIndex((folders) => folders.includes(folder));
    const arrows = Object.entries(ARROWS).flatMap(([from, targets]) => targets.map((to) => ({ from, to })));
    const wrong = arrows.filter(({ from, to }) => level(from) < 0 || level(to) <= level(from));
    expect(wrong.map(({ from, to }) => `${from} → ${to}`)).toEqual([`${SIDEWAYS.from} → ${SIDEWAYS.to}`]);
    const files = inside(true).filter(({ from, to }) => from === SIDEWAYS.from && to === SIDEWAYS.to);
    expect(files.filter(({ target }) => !target.endsWith(SIDEWAYS.file)).map(describeImport)).toEqual([]);
  });

  test("each package is behind one folder", () => {
    expect(unlisted(inside(false), OUTSIDE)).toEqual([]);
    expect(unused(inside(false), OUTSIDE)).toEqual([]);
    const packages = Object.values(OUTSIDE).flat();
    expect(packages.filter((name, index) => packages.indexOf(name) !== index)).toEqual([]);
  });
});

function inside(isInside: boolean): Import[] {
  return IMPORTS.filter((one) => one.isInside === isInside);
}

const unlisted = (imports: readonly Import[], list: Record<string, string[]>): string[] =>
  imports.filter(({ from, to }) => !list[from]?.includes(to)).map(describeImport);

const unused = (imports: readonly Import[], list: Record<string, string[]>): string[] =>
  Object.entries(list).flatMap(([from, targets]) =>
    targets
      .filter((to) => !imports.some((one) => one.from === from && one.to === to))
      .map((to) => `${from} → ${to}: nothing imports it any more`),
  );

const describeImport = ({ file, target, from, to }: Import): string =>
  `${from} → ${to}: src/${file} imports "${target}"`;

function importsOf(file: string, text: string): Import[] {
  const targets = [...text.matchAll(/\b(?:from|import|require)\s*\(?\s*"([^"]+)"/g)].map(([, target]) => target!);
  return targets
    .filter((target) => !/^(node|bun):|^bun$/.test(target))
    .map((target) => ({ file, target, from: folderOf(file), ...destinationOf(file, target) }));
}

/** The folder of src that a file is in; a file beside the folders stands for itself. */
function folderOf(path: string): string {
  return path.split(sep)[0]!;
}

function destinationOf(file: string, target: string): { to: string; isInside: boolean } {
  if (!target.startsWith(".")) return { to: packageOf(target), isInside: false };
  const path = normalize(join(dirname(file), target));
  if (!path.startsWith("..")) return { to: folderOf(path), isInside: true };
  const [, first, ...rest] = path.split(sep);
  return { to: first === "node_modules" ? packageOf(rest.join("/")) : first!, isInside: false };
}

function packageOf(specifier: string): string {
  return specifier
    .split("/")
    .slice(0, specifier.startsWith("@") ? 2 : 1)
    .join("/");
}
