import { beforeAll, describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { type Device } from "../../src/gpu/device.ts";
import { type Kernel, PipelineCache } from "../../src/gpu/kernel.ts";
import * as kernels from "../../src/kernels/index.ts";
import { describeOnDevices } from "../support/device.ts";

type AnyKernel = Kernel<string, string, string, never>;

/** Every kernel that `src/kernels` exports, alone or in a table of variants. */
const TWINS: AnyKernel[] = Object.values(kernels as Record<string, unknown>).flatMap(kernelsIn);

const SHADERS = join(import.meta.dir, "../../shaders");
const KERNEL_FILES = shaderFiles(SHADERS);
const LIBRARY_FILES = shaderFiles(join(SHADERS, "lib"));

/** DeepSeek-V3's, but a latent of odd size. */
const LATENT = {
  WEIGHT_STRIDE: 512,
  COLUMNS: 511,
  PLAIN: 128,
  TURNED: 64,
  VALUE: 128,
  LATENT: 511,
  STRIDE: 24576,
  STRIDE_OUT: 73600,
};
const EXPERT = { WEIGHT_STRIDE: 768, COLUMNS: 767, STRIDE_OUT: 2304, OUT_AT: 8, SHARE: 8 };

/** GPT-2's own numbers, but a head of odd size, so that the code for its half word is compiled. */
const CONSTANTS: Record<string, Record<string, number>> = {
  activation: { STRIDE: 3072, ACTIVATION: 0, WORKGROUP: 64 },
  add: { STRIDE: 768, ROUND: 1, WORKGROUP: 64 },
  argmax: { COLUMNS: 50257, STRIDE: 50264, WORKGROUP: 128 },
  attention_prefill: {
    HEAD_DIM: 63,
    HEADS: 12,
    KV_HEADS: 12,
    STRIDE: 2304,
    HEAD_STRIDE: 63,
    SCALE: 0.125,
    SOFTCAP: 50,
    WINDOW: 100,
    QUERIES: 8,
    STRIDE_OUT: 768,
    HEAD_WORDS: 32,
    SLICE_WORDS: 20,
  },
  attention_lanes: {
    HEAD_DIM: 63,
    HEADS: 12,
    KV_HEADS: 12,
    STRIDE: 2304,
    HEAD_STRIDE: 63,
    SCALE: 0.125,
    SOFTCAP: 50,
    WINDOW: 100,
    STRIDE_OUT: 768,
  },
  attention_decode: {
    HEAD_DIM: 63,
    HEADS: 12,
    KV_HEADS: 12,
    STRIDE: 2304,
    HEAD_STRIDE: 63,
    SCALE: 0.125,
    SOFTCAP: 50,
    WINDOW: 100,
  },
  attention_merge: { HEAD_DIM: 63, HEADS: 12, WINDOW: 100, STRIDE_OUT: 768 },
  ...inEachEncoding("absorb_query", LATENT),
  ...inEachEncoding("expand_value", LATENT),
  latent_write: { STRIDE: 576, COLUMNS: 575, WORKGROUP: 64 },
  route: {
    EXPERTS: 256,
    STRIDE: 256,
    CHOSEN: 8,
    SIGMOID: 1,
    HAS_BIAS: 1,
    GROUPS: 8,
    TOP_GROUPS: 4,
    GROUP_BEST: 2,
    NORMALIZE: 1,
    SCALE: 2.5,
  },
  group_pairs: { EXPERTS: 256 },
  ...inEachEncoding("expert_gemv", { ...EXPERT, OUTPUTS: 4, BLOCKS: 24 }),
  ...inEachEncoding("expert_lanes", EXPERT),
  ...inEachEncoding("expert_gemm", EXPERT),
  combine_experts: { CHOSEN: 8, STRIDE: 768, WORKGROUP: 64 },
  add_gated: { STRIDE: 768, GATE_STRIDE: 8, WORKGROUP: 64 },
  embed: { STRIDE: 768, WORKGROUP: 64 },
  gather_rows: { STRIDE: 768, WORKGROUP: 64 },
  embed_tokens: { STRIDE: 768, SCALE: 27.75, WORKGROUP: 64 },
  gated_activation: { COLUMNS: 1023, STRIDE: 2048, STRIDE_OUT: 1024, ACTIVATION: 3, WORKGROUP: 64 },
  head_norm: { HEAD_DIM: 63, HEAD_STRIDE: 63, FIRST: 63, STRIDE: 768, EPS: 1e-6, OFFSET: 1, WORKGROUP: 64 },
  rms_norm: { COLUMNS: 768, STRIDE: 768, EPS: 1e-6, OFFSET: 1, WORKGROUP: 128 },
  rope: {
    HEADS: 12,
    HEAD_STRIDE: 63,
    FIRST: 0,
    PAIRS: 31,
    INTERLEAVED: 0,
    STRIDE: 2304,
    ANGLE_STRIDE: 64,
    WORKGROUP: 64,
  },
  softcap: { STRIDE: 768, CAP: 30, WORKGROUP: 64 },
  absmax: { COLUMNS: 768, X_STRIDE: 768, BLOCK: 64, WORKGROUP: 64 },
  ...inEachEncoding("dequantize", { WEIGHT_STRIDE: 768, COLUMNS: 767, WORKGROUP: 64 }),
  ...inEachEncoding("gemv_lanes", {
    WEIGHT_STRIDE: 768,
    COLUMNS: 767,
    STRIDE_OUT: 2304,
    OUT_AT: 8,
    HAS_BIAS: 1,
    ROUND: 1,
  }),
  ...inEachEncoding("gemm_lanes", {
    WEIGHT_STRIDE: 760,
    COLUMNS: 759,
    STRIDE_OUT: 2304,
    OUT_AT: 8,
    HAS_BIAS: 1,
    ROUND: 1,
  }),
  ...inEachEncoding("gemm", { WEIGHT_STRIDE: 768, COLUMNS: 767, STRIDE_OUT: 2304, OUT_AT: 8, HAS_BIAS: 1, ROUND: 1 }),
  ...inEachEncoding("gemv", {
    WEIGHT_STRIDE: 768,
    COLUMNS: 767,
    OUTPUTS: 4,
    STRIDE_OUT: 2304,
    OUT_AT: 8,
    HAS_BIAS: 1,
    ROUND: 1,
    BLOCKS: 24,
  }),
  gemm_codes: { WEIGHT_STRIDE: 768, STRIDE_OUT: 2304, OUT_AT: 8, HAS_BIAS: 1 },
  gemv_codes: { WEIGHT_STRIDE: 768, STRIDE_OUT: 2304, OUT_AT: 8, HAS_BIAS: 1, OUTPUTS: 4 },
  outlier_columns: { STRIDE: 768 },
  quantize_rows: { STRIDE: 768, WORKGROUP: 64 },
  kv_write: { STRIDE: 2304, KV_HEADS: 12, HEAD_DIM: 63, HEAD_STRIDE: 63, KEYS_AT: 768, VALUES_AT: 1536, WORKGROUP: 64 },
  layer_norm: { COLUMNS: 768, STRIDE: 768, EPS: 1e-5, WORKGROUP: 128 },
  quantize_int8: { X_STRIDE: 768, WORKGROUP: 64 },
  quantize_nf4: { COLUMNS: 767, X_STRIDE: 768, WORKGROUP: 64 },
  pack_bf16: { COLUMNS: 768, STRIDE: 768, WORKGROUP: 64 },
  transpose_bf16: { IN_STRIDE: 2304, OUT_STRIDE: 768, WORKGROUP: 64 },
  unpack_bf16: { COLUMNS: 768, STRIDE: 768, WORKGROUP: 64 },
};

function inEachEncoding(name: string, constants: Record<string, number>): typeof CONSTANTS {
  return Object.fromEntries(["bf16", "int8", "nf4", "fp4"].map((encoding) => [`${name}_${encoding}`, constants]));
}

describe("a kernel's twin says what its shader says:", () => {
  test.each(TWINS.map((twin) => [labelOf(twin), twin] as const))("%s", (_, { source, ...twin }) => {
    const code = withoutComments(source);

    const storage = [...code.matchAll(/@group\(0\) @binding\((\w+)\) var<storage, (\w+)> (\w+)\s*:/g)];
    const numberOf = (text: string) =>
      Number(/^\d+$/.test(text) ? text : new RegExp(`const ${text} = (\\d+);`).exec(code)?.[1]);
    const byNumber = storage.map(([, number, access, name]) => [numberOf(number!), name!, access!] as const);
    byNumber.sort(([a], [b]) => a - b);
    expect(byNumber).toEqual(Object.entries(twin.bindings).map(([name, access], i) => [i + 1, name, access] as const));

    const uniforms = [...code.matchAll(/@group\(0\) @binding\((\d+)\) var<uniform> (\w+): (\w+);/g)];
    const hasParams = Object.keys(twin.params).length > 0;
    expect(uniforms.map(([, ...parts]) => parts)).toEqual(hasParams ? [["0", "params", "Params"]] : []);
    const [, fields = ""] = /struct Params \{([^}]*)\}/.exec(code) ?? [];
    const declared = [...fields.matchAll(/(\w+)\s*:\s*(\w+)/g)].map(([, name, type]) => [name!, type!] as const);
    expect(declared).toEqual(Object.entries(twin.params));

    // Nothing is bound in a spelling that the patterns above do not know.
    expect(code.match(/@binding/g)).toHaveLength(storage.length + uniforms.length);

    const overrides = [...code.matchAll(/\boverride (\w+)\s*:\s*\w+\s*(=?)/g)];
    expect(code.match(/\boverride\b/g) ?? []).toHaveLength(overrides.length);
    expect(overrides.map(([, name]) => name!).sort()).toEqual([...twin.constants].sort());
    expect(overrides.filter(([, , value]) => value).map(([, name]) => name)).toEqual([]); // no defaults

    expect([...code.matchAll(/@compute @workgroup_size\([^)]*\)\s*fn (\w+)/g)].map(([, name]) => name)).toEqual([
      "main",
    ]);
  });
});

describe("a shader file", () => {
  test.each(KERNEL_FILES)(
    "$name has a twin of its name, which joins libraries in front of it and nothing else",
    (file) => {
      const stem = basename(file.name, ".wgsl");
      const twins = TWINS.filter(({ source }) => source.endsWith(file.text));
      expect(twins.length).toBeGreaterThan(0);
      for (const { name, source } of twins) {
        expect(name === stem || name.startsWith(`${stem}_`)).toBe(true);
        const libraries = LIBRARY_FILES.filter(({ text }) => source.includes(text));
        const joined = [...libraries, file].reduce((characters, { text }) => characters + text.length + 1, -1);
        expect(source.length).toBe(joined);
      }
    },
  );

  test.each(LIBRARY_FILES)("lib/$name is joined by a twin", ({ text }) => {
    expect(TWINS.some(({ source }) => source.includes(text))).toBe(true);
  });

  test.each([...KERNEL_FILES, ...LIBRARY_FILES])("$name opens with what it is for", ({ text }) => {
    const [first] = text.split("\n").filter((line) => !/^(enable|requires) |^$/.test(line));
    expect(first).toStartWith("// ");
  });

  const readme = readFileSync(join(SHADERS, "README.md"), "utf8").replace(/ +/g, " ").split("\n");
  const rowOf = (name: string) => readme.find((line) => line.startsWith(`| \`${name}\` |`))?.split(" | ") ?? [];

  test.each(TWINS.map((twin) => [labelOf(twin), twin] as const))(
    "is in the table of shaders/README.md with its bindings and overrides: %s",
    (_, twin) => {
      const { name } = KERNEL_FILES.find(({ text }) => twin.source.endsWith(text))!;
      const [, , bindings = "", overrides = ""] = rowOf(basename(name, ".wgsl"));
      const params = Object.keys(twin.params);
      const isEncoded =
        /^(gemm|gemv|gemv_lanes|gemm_lanes|dequantize|expert_gemv|expert_lanes|expert_gemm|absorb_query|expand_value)_(int8|nf4|fp4)$/.test(
          twin.name,
        ); // the table of libraries says what those need besides
      const own = (names: string[]) => names.filter((name) => !isEncoded || (name !== "scales" && name !== "COLUMNS"));
      const tensors = own(Object.keys(twin.bindings)).map((tensor) =>
        twin.bindings[tensor] === "read" ? tensor : `**${tensor}**`,
      );
      expect(bindings).toBe([...(params.length > 0 ? [`params: ${params.join(", ")}`] : []), ...tensors].join(" · "));
      expect(overrides.replace(/ \|$/, "").split(" ").toSorted()).toEqual(own([...twin.constants]).toSorted());
    },
  );

  test.each(LIBRARY_FILES)("is in the table of libraries with those that join it: lib/$name", ({ name, text }) => {
    const joinedBy = KERNEL_FILES.filter((file) =>
      TWINS.some(({ source }) => source.includes(text) && source.endsWith(file.text)),
    );
    const [, , kernelNames = ""] = rowOf(`lib/${name}`);
    const listed = [...kernelNames.matchAll(/`(\w+)`/g)].map(([, kernel]) => `${kernel}.wgsl`);
    expect(listed.toSorted()).toEqual(joinedBy.map((file) => file.name).toSorted());
  });
});

describe("a number that host and shader share is the same in both:", () => {
  const constantOf = (file: string, name: string): number => {
    const { text } = [...KERNEL_FILES, ...LIBRARY_FILES].find((f) => f.name === file)!;
    return Number(new RegExp(`const ${name}\\b[^=]*= (\\w+?)u?;`).exec(text)?.[1]);
  };

  test("the keys of a chunk", () => {
    const keys = constantOf("queries.wgsl", "KEYS");
    expect([1, keys, keys + 1, 2 * keys, 2 * keys + 1].map(kernels.chunksOf)).toEqual([1, 1, 2, 2, 3]);
  });

  test("the words of a run of queries", () => {
    const { text } = LIBRARY_FILES.find(({ name }) => name === "queries.wgsl")!;
    const [, fields = ""] = /struct Queries \{([^}]*)\}/.exec(text) ?? [];
    expect(fields.match(/: u32/g)).toHaveLength(kernels.QUERIES_WORDS);
  });

  test("the lanes of gemv_lanes", () => {
    const lanes = constantOf("gemv_lanes.wgsl", "LANES");
    expect(kernels.gemvLanes.plain.bf16.workgroups({ rows: 3, outputs: lanes + 1 })).toEqual([2, 3, 1]);
  });

  test("the lanes of expert_lanes", () => {
    const lanes = constantOf("expert_lanes.wgsl", "LANES");
    expect(kernels.expertLanes.plain.bf16.workgroups({ pairs: 3, outputs: lanes + 1 })).toEqual([2, 3, 1]);
  });

  test("the lanes and rows of gemm_lanes", () => {
    const of = (name: string) => constantOf("gemm_lanes.wgsl", name);
    const [rows, outputs] = [of("ROWS"), of("LANES") * of("OUTPUTS")];
    const { workgroups } = kernels.gemmLanes.plain.bf16;
    expect(workgroups({ rows, outputs: outputs + 1 })).toEqual([2, 1, 1]);
    expect(workgroups({ rows: rows + 1, outputs })).toEqual([1, 2, 1]);
  });

  test("the tile of gemm", () => {
    const tile = constantOf("gemm.wgsl", "TILE");
    const { workgroups } = kernels.gemm.bf16;
    expect(workgroups({ rows: tile, outputs: 2 * tile + 1 })).toEqual([3, 1, 1]);
    expect(workgroups({ rows: tile + 1, outputs: 1 })).toEqual([1, 2, 1]);
  });

  test("the tile of experts, and the words of an entry of their table", () => {
    expect(constantOf("expert_gemm.wgsl", "TILE")).toBe(kernels.EXPERT_TILE);
    expect(constantOf("group_pairs.wgsl", "TILE")).toBe(kernels.EXPERT_TILE);
    expect(kernels.expertGemm.bf16.workgroups({ tiles: 3, outputs: kernels.EXPERT_TILE + 1 })).toEqual([2, 3, 1]);
    const { text } = KERNEL_FILES.find(({ name }) => name === "group_pairs.wgsl")!;
    expect(text).toContain(`tiles: array<vec${kernels.TILE_WORDS}<u32>>`);
  });

  test("the tokens that the kernels of latents take together", () => {
    for (const file of ["absorb_query.wgsl", "expand_value.wgsl"]) {
      const tokens = constantOf(file, "TOKENS");
      const { workgroups } = file === "absorb_query.wgsl" ? kernels.absorbQuery.bf16 : kernels.expandValue.bf16;
      const dims = { heads: 3, latent: 512, value: 64 };
      expect(workgroups({ ...dims, rows: tokens })).toEqual([1, 3, 1]);
      expect(workgroups({ ...dims, rows: tokens + 1 })).toEqual([1, 3, 2]);
    }
  });

  test("the tile of gemm_codes, and the columns of a word of outliers", () => {
    expect(constantOf("gemm_codes.wgsl", "TILE")).toBe(constantOf("gemm.wgsl", "TILE"));
    expect(constantOf("outlier_columns.wgsl", "COLUMNS")).toBe(kernels.OUTLIER_COLUMNS);
  });

  test("the answer for a row without a best token", () => {
    expect(constantOf("argmax.wgsl", "NOT_A_TOKEN")).toBe(kernels.NOT_A_TOKEN);
  });

  test("the activations", () => {
    const { text } = LIBRARY_FILES.find(({ name }) => name === "activation.wgsl")!;
    const cases = [...text.matchAll(/^ +case (\d+)u:/gm)].map(([, value]) => Number(value));
    expect(Object.values<number>(kernels.ACTIVATIONS)).toEqual([...cases, cases.length]); // the last is the default
  });
});

describeOnDevices("every kernel compiles, with every library,", ({ open }) => {
  let device: Device;
  beforeAll(async () => void (device = await open()));

  test.each(TWINS.map((twin) => [labelOf(twin), twin] as const))(
    "%s",
    async (label, twin) => {
      if (twin.source.includes("enable subgroups;") && !device.hasSubgroups) return;
      const constants = CONSTANTS[twin.name]!;
      expect(Object.keys(constants)).toEqual(expect.arrayContaining([...twin.constants]));
      await PipelineCache.of(device).compile(twin, constants);
    },
    30_000,
  );
});

function kernelsIn(value: unknown): AnyKernel[] {
  if (typeof value !== "object" || value === null) return [];
  return "source" in value ? [value as AnyKernel] : Object.values(value).flatMap(kernelsIn);
}

interface ShaderFile {
  name: string;
  text: string;
}

function shaderFiles(folder: string): ShaderFile[] {
  const names = readdirSync(folder).filter((name) => name.endsWith(".wgsl"));
  return names.map((name) => ({ name, text: readFileSync(join(folder, name), "utf8") }));
}

/** `gemm_bf16 (bf16 + weight_bf16)`: the kernel, and what is joined in front of it. */
function labelOf({ name, source }: AnyKernel): string {
  const libraries = LIBRARY_FILES.filter(({ text }) => source.includes(text)).map((file) =>
    basename(file.name, ".wgsl"),
  );
  return libraries.length > 0 ? `${name} (${libraries.join(" + ")})` : name;
}

const withoutComments = (code: string): string => code.replaceAll(/\/\/.*/g, "");
