import codeFp4 from "../../shaders/lib/code_fp4.wgsl" with { type: "text" };
import codeNf4 from "../../shaders/lib/code_nf4.wgsl" with { type: "text" };
import weight4bit from "../../shaders/lib/weight_4bit.wgsl" with { type: "text" };
import weightBf16 from "../../shaders/lib/weight_bf16.wgsl" with { type: "text" };
import weightInt8 from "../../shaders/lib/weight_int8.wgsl" with { type: "text" };
import type { Access } from "../gpu/kernel.ts";

/** How a weight lies on the device, and with it which library stands in front of a kernel that reads it. */
export type Encoding = "bf16" | "int8" | "nf4" | "fp4";

interface WeightLibrary {
  readonly sources: readonly string[];
  /** What it binds behind the kernel's own. */
  readonly bindings: Readonly<Partial<Record<"scales", Access>>>;
  /** The overrides it declares. */
  readonly constants: readonly WeightConstant[];
}

type WeightConstant = "WEIGHT_STRIDE" | "COLUMNS";

export const WEIGHT_LIBRARIES: Readonly<Record<Encoding, WeightLibrary>> = {
  bf16: { sources: [weightBf16], bindings: {}, constants: ["WEIGHT_STRIDE"] },
  int8: { sources: [weightInt8], bindings: { scales: "read" }, constants: ["WEIGHT_STRIDE"] },
  nf4: { sources: [codeNf4, weight4bit], bindings: { scales: "read" }, constants: ["WEIGHT_STRIDE", "COLUMNS"] },
  fp4: { sources: [codeFp4, weight4bit], bindings: { scales: "read" }, constants: ["WEIGHT_STRIDE", "COLUMNS"] },
};

/** One kernel for each encoding. */
export const forEachEncoding = <K>(define: (encoding: Encoding) => K): Readonly<Record<Encoding, K>> => ({
  bf16: define("bf16"),
  int8: define("int8"),
  nf4: define("nf4"),
  fp4: define("fp4"),
});

/**
 * The bindings and constants of a kernel behind a weight library. Every encoding takes the same ones, and those that an
 * encoding has no use for are left out when it is compiled and run.
 */
export const withWeight = <const B extends string, const C extends string>(
  encoding: Encoding,
  own: { bindings: Readonly<Record<B, Access>>; constants: readonly C[] },
) => ({
  bindings: { weight: "read", ...own.bindings, ...WEIGHT_LIBRARIES[encoding].bindings } as Readonly<
    Record<B | "weight" | "scales", Access>
  >,
  constants: [...WEIGHT_LIBRARIES[encoding].constants, ...own.constants] as readonly (C | WeightConstant)[],
});
